"""A blockwise ControlNet steers the denoiser, and is trained by the published commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import InputError
from dstrain.cli.main import main
from dstrain.plugin import Unit
from dstrain_qwen_image import control
from dstrain_qwen_image.toy import write
from dstrain_qwen_image.units import encode_image
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.support.noise_images import noise_image

INPAINT = "blockwise-controlnet-inpaint"
CANNY = "DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-Canny"
MODELS = """Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors
    Qwen/Qwen-Image:text_encoder/model*.safetensors
    Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"""
DATA = ["--dataset_base_path", "data", "--data_file_keys"]


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def predict(loaded: dict[str, Any], channels: int = 16) -> Tensor:
    return control.predict_controlled(
        noise(2, 16, 1, 4, 6),
        torch.tensor([300.0, 700.0]),
        noise(2, 5, 32),
        torch.ones(2, 5, dtype=torch.bool),
        noise(2, channels, 1, 4, 6),
        dit=loaded["dit"],
        blockwise_controlnet=loaded["blockwise_controlnet"],
    )


def test_checkpointing_changes_no_gradient(
    components_of: Callable[[str], dict[str, Any]],
) -> None:
    gradients = []
    for checkpointed in (False, True):
        loaded = components_of("blockwise-controlnet")
        network = loaded["blockwise_controlnet"].requires_grad_(True)
        if checkpointed:
            loaded["dit"].enable_gradient_checkpointing()
        predict(loaded).square().sum().backward()
        gradients.append({name: one.grad for name, one in network.named_parameters()})
    plain, recomputed = gradients
    for name, gradient in plain.items():
        assert gradient is not None and gradient.any(), name
        assert torch.equal(gradient, recomputed[name]), name


def test_a_controlnet_of_other_inputs_is_refused_by_their_number(
    components_of: Callable[[str], dict[str, Any]],
) -> None:
    with pytest.raises(InputError, match=r"has 68 input channels; .* gives 64"):
        predict(components_of(INPAINT))
    predict(components_of(INPAINT), channels=17)


@torch.no_grad()
@pytest.mark.parametrize(
    ("unit", "image", "latents"),
    [
        (
            control.encode_control_image,
            "blockwise_controlnet_image",
            "control_latents",
        ),
        (control.encode_context_image, "context_image", "context_latents"),
    ],
)
def test_a_conditioning_image_is_cropped_to_the_generated_size(
    unit: Any, image: str, latents: str, loaded: dict[str, Any]
) -> None:
    wide = noise_image(96, 32)
    made = Unit(unit).run({image: wide, "height": 32, "width": 32}, loaded)
    middle = {"input_image": wide.crop((32, 0, 64, 32))}
    wanted = Unit(encode_image).run(middle, loaded)
    assert torch.equal(made[latents], wanted["input_latents"])


@torch.no_grad()
def test_what_is_inpainted_is_black_and_0_in_the_channel_of_the_mask(
    components_of: Callable[[str], dict[str, Any]],
) -> None:
    loaded = components_of(INPAINT)
    image, mask = noise_image(48, 32), Image.new("L", (48, 32))
    mask.paste(255, (16, 0, 32, 32))
    given = {
        "blockwise_controlnet_image": image,
        "blockwise_controlnet_inpaint_mask": mask,
        "height": 32,
        "width": 48,
    }
    made = Unit(control.encode_inpaint_image).run(given, loaded)["control_latents"]
    assert made.shape == (1, 17, 1, 4, 6)
    assert made[0, 16, 0].tolist() == [[1, 1, 0, 0, 1, 1]] * 4
    image.paste(0, (16, 0, 32, 32))
    black = Unit(encode_image).run({"input_image": image}, loaded)["input_latents"]
    assert torch.equal(made[:, :16], black)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the toy of a Canny ControlNet where it is published, and a dataset."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models/Qwen/Qwen-Image"
    write(model, "blockwise-controlnet")
    place = tmp_path / "models" / CANNY
    place.mkdir(parents=True)
    folder = model / "blockwise_controlnet"
    (folder / "diffusion_pytorch_model.safetensors").rename(place / "model.safetensors")
    # The published file has none: its configuration is known by its id.
    (folder / "config.json").rename(place / "config.json")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("image", "edges"):
        noise_image(64, 32).save(data / f"{name}.png")
    row = {"image": "image.png", "prompt": "a dog"}
    row["blockwise_controlnet_image"] = "edges.png"
    (data / "metadata.json").write_text(json.dumps([row]))
    return tmp_path


@pytest.mark.usefixtures("project")
def test_the_published_command_trains_the_controlnet_and_saves_its_published_names() -> (
    None
):
    command = """--model qwen_image --learning_rate 1e-3 --max_steps 2 --output_path out
        --trainable_models blockwise_controlnet --extra_inputs blockwise_controlnet_image
        --remove_prefix_in_ckpt pipe.blockwise_controlnet.models.0.
        --use_gradient_checkpointing --find_unused_parameters"""
    files = ",".join([*MODELS.split(), f"{CANNY}:model.safetensors"])
    words = [*command.split(), "--model_id_with_origin_paths", files, *DATA]
    assert main([*words, "image,blockwise_controlnet_image"]) == 0
    before = load_file(f"models/{CANNY}/model.safetensors")
    saved = max(Path("out").glob("*.safetensors"))
    after = load_file(saved)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("project")
def test_lora_on_the_denoiser_learns_beside_a_controlnet_and_generates_with_it() -> (
    None
):
    words = ["--model_id", CANNY, "--max_steps", "1", "--output_path", "out", *DATA]
    assert main([*words, "image,blockwise_controlnet_image"]) == 0
    (lora,) = Path("out").glob("*.safetensors")
    words = ["generate", "--model_id", CANNY, "--prompt", "a dog", "--height", "32"]
    words += ["--width", "64", "--num_inference_steps", "1", "--lora", str(lora)]
    image = ["--input", "blockwise_controlnet_image=data/edges.png"]
    assert main([*words, *image, "--output", "dog.png"]) == 0
    with Image.open("dog.png") as image_made:
        assert image_made.size == (64, 32)
