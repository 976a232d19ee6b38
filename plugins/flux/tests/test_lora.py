"""A LoRA file that is saved here acts in diffusers' pipelines as it does here, at a
rank that is not its alpha.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from dstrain import LoraConfig, ModelConfig, Pipeline, save_lora
from dstrain.lora import inject
from dstrain.models import pack
from dstrain_flux import LORA_ALIASES, MODEL
from dstrain_flux.toy import write
from PIL import Image
from torch import Tensor, nn

from tests.support.published_steps import add_to, assert_equal_steps

PARTS = ("transformer", "text_encoder", "text_encoder_2", "vae")
SIZE = {"height": 32, "width": 48, "num_inference_steps": 2}
IMAGE = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
pytestmark = pytest.mark.filterwarnings("default")


def opened(folder: Path, variant: str) -> Pipeline:
    paths = [sorted(map(str, (folder / part).glob("*.safetensors"))) for part in PARTS]
    return Pipeline.from_pretrained(
        "flux", [ModelConfig(path=path) for path in paths], variant
    )


def saved(
    module: nn.Module, component: str, targets: tuple[str, ...], file: Path
) -> Path:
    """Write a LoRA file with weights that show, of rank 4 and alpha 6, as a run does."""
    lora_config = LoraConfig(component, targets, 4, 6.0)
    inject(module, lora_config, MODEL.lora_aliases)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora_" in name:
                weight.normal_(
                    generator=torch.Generator().manual_seed(weight.numel()), std=0.3
                )
    save_lora(file, module, lora_config, MODEL.lora_prefixes[component], {})
    return file


def ours(
    folder: Path, variant: str, lora: Path | None, noise: Tensor, given: dict[str, Any]
) -> list[Tensor]:
    pipe, passed = opened(folder, variant), []
    if lora is not None:
        pipe.load_lora(lora)
    pipe(
        prompt="a dog",
        latents=noise,
        on_step=lambda i, latents: passed.append(pack(latents)),
        **given,
        **SIZE,
    )
    return passed


def theirs(
    folder: Path, lora: Path, noise: Tensor, given: dict[str, Any]
) -> list[Tensor]:
    pipeline, passed = DiffusionPipeline.from_pretrained(folder), []
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(lora)

    pipeline(
        prompt="a dog",
        latents=pack(noise),
        callback_on_step_end=add_to(passed),
        **given,
        **SIZE,
    )
    return passed


@torch.no_grad()
@pytest.mark.parametrize("component", ["dit", "text_encoder_1"])
@pytest.mark.parametrize("variant", ["dev", "kontext"])
def test_a_lora_file_gives_the_same_latents_in_diffusers_at_each_step(
    variant: str, component: str, tmp_path: Path
) -> None:
    write(tmp_path / "toy", variant)
    module = opened(tmp_path / "toy", variant).components[component]
    targets = (
        *MODEL.lora_targets[component],
        *(LORA_ALIASES if component == "dit" else ()),
    )
    file = saved(module, component, targets, tmp_path / "lora.safetensors")
    noise = torch.randn(1, 16, 4, 6, generator=torch.Generator().manual_seed(5))
    images, image = {}, {}
    if variant == "kontext":
        images = {
            "kontext_images": [IMAGE],
            "kontext_pixels": 64 * 64,
            "embedded_guidance": 3.5,
        }
        image = {"image": IMAGE, "max_area": 32 * 48, "_auto_resize": False}
    made = ours(tmp_path / "toy", variant, file, noise, images)
    wanted = theirs(tmp_path / "toy", file, noise, image)
    assert_equal_steps(made, wanted, SIZE["num_inference_steps"])
    without = ours(tmp_path / "toy", variant, None, noise, images)
    assert (without[-1] - wanted[-1]).abs().max() > 1e-2


def test_files_of_text_encoders_are_distinguished_by_their_prefix(
    tmp_path: Path,
) -> None:
    """`text_encoder` begins `text_encoder_2`."""
    write(tmp_path / "toy")
    for component in ("text_encoder_1", "text_encoder_2"):
        module = opened(tmp_path / "toy", "dev").components[component]
        file = saved(
            module,
            component,
            MODEL.lora_targets[component],
            tmp_path / f"{component}.safetensors",
        )
        pipe = opened(tmp_path / "toy", "dev")
        pipe.load_lora(file)
        assert [
            n for n in pipe.components if hasattr(pipe.components[n], "peft_config")
        ] == [component]


def test_the_reference_documents_names_are_all_of_them() -> None:
    """Of FAMILIES: `--lora_target_modules` of DiffSynth-Studio's commands."""
    names = "a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,norm.linear"
    assert list(LORA_ALIASES) == [
        *names.split(","),
        "norm1_a.linear",
        "norm1_b.linear",
        "to_qkv_mlp",
    ]
    assert MODEL.lora_prefixes == {
        "dit": "transformer",
        "controlnet": "controlnet",
        "text_encoder_1": "text_encoder",
        "text_encoder_2": "text_encoder_2",
    }
