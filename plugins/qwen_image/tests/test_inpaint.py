"""A part of an image is generated anew, as diffusers does it; training knows no mask."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageInpaintPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_inpaint as published_module
from dstrain.cli.main import main
from dstrain.graph.plan import make_plan
from dstrain.graph.unit import Unit
from dstrain.models.component_files import ModelConfig
from dstrain.pipeline.pipeline import Pipeline
from dstrain.training.losses import SFT
from dstrain_qwen_image import MODEL, inpaint
from dstrain_qwen_image.model_fn import unpack
from PIL import Image
from torch import Tensor


def noise_image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def half_mask(width: int, height: int) -> Image.Image:
    mask = Image.new("L", (width, height))
    mask.paste(255, (width // 2 - 3, 0, width, height))
    return mask


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_every_step_equals_that_of_diffusers_inpainting(
    scale: float, toy_folder: Path
) -> None:
    files = [
        ModelConfig(path=sorted(map(str, place.glob("*.safetensors"))))
        for place in (toy_folder / "transformer", toy_folder / "text_encoder")
    ]
    files.append(ModelConfig(path=str(next((toy_folder / "vae").glob("*.s*s")))))
    pipe = Pipeline.from_pretrained(
        "qwen_image", files, "base", device="cpu", torch_dtype=torch.float32
    )
    noise = torch.randn(1, 16, 1, 4, 6, generator=torch.Generator().manual_seed(3))
    image, mask = noise_image(48, 32), half_mask(48, 32)
    ours: list[Tensor] = []
    shared = {"height": 32, "width": 48, "num_inference_steps": 4}
    made = pipe(
        prompt="a dog",
        negative_prompt="blurry",
        input_image=image,
        inpaint_mask=mask,
        guidance_scale=scale,
        latents=noise,
        on_step=lambda step, latents: ours.append(latents),
        **shared,
    )
    parts = {
        name: pipe.components[name] for name in ("text_encoder", "tokenizer", "vae")
    }
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        toy_folder / "scheduler"
    )
    published = QwenImageInpaintPipeline(
        scheduler=scheduler, transformer=pipe.components["dit"], **parts
    )
    published.set_progress_bar_config(disable=True)
    theirs: list[Tensor] = []

    def keep(
        _: Any, step: int, timestep: Any, values: dict[str, Any]
    ) -> dict[str, Any]:
        theirs.append(unpack(values["latents"], 4, 6))
        return values

    with pytest.MonkeyPatch.context() as patch:
        # It draws the noise itself, since what is given as `latents` breaks it, and a
        # sample of the VAE's distribution, where ours is the mode.
        patch.setattr(
            published_module, "randn_tensor", lambda *_, **__: noise.transpose(1, 2)
        )
        patch.setattr(
            published_module,
            "retrieve_latents",
            lambda made, generator: made.latent_dist.mode(),
        )
        (wanted,) = published(
            prompt="a dog",
            negative_prompt="blurry",
            image=image,
            mask_image=mask,
            strength=1.0,
            true_cfg_scale=scale,
            callback_on_step_end=keep,
            **shared,
        ).images
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    difference = np.abs(np.asarray(made, int) - np.asarray(wanted, int))
    assert difference.max() <= 1


@torch.no_grad()
def test_what_is_outside_the_mask_is_the_image_as_noisy_as_the_rest(
    loaded: dict[str, Any],
) -> None:
    values = {"input_image": noise_image(48, 32), "inpaint_mask": half_mask(48, 32)}
    made = Unit(inpaint.encode_inpainted).run(
        {**values, "height": 32, "width": 48}, loaded
    )
    assert made["inpaint_region"][0, 0, 0].tolist() == [[0, 0, 0, 1, 1, 1]] * 4
    latents, noise = (
        torch.full((2, 16, 1, 4, 6), 9.0),
        torch.full((2, 16, 1, 4, 6), 2.0),
    )
    times = torch.tensor([0.0, 250.0])
    found = inpaint.keep_outside(latents, times, noise, **made)
    assert (found.latents[..., 3:] == 9).all()
    kept = made["inpaint_latents"][0, ..., :3]
    assert torch.equal(found.latents[0, ..., :3], kept)
    assert torch.allclose(found.latents[1, ..., :3], 0.25 * 2 + 0.75 * kept)
    assert torch.equal(found.mask, made["inpaint_region"])


def test_training_knows_no_mask() -> None:
    inputs = frozenset({"prompt", "input_image", "height", "width"})
    plan = make_plan(MODEL.spec("base"), inputs, SFT, ("dit",))
    assert "encode_inpainted" not in [step.unit.name for step in plan.cached_steps]
    latents = torch.ones(1, 16, 1, 2, 2)
    found = inpaint.keep_outside(latents, torch.tensor([500.0]), latents)
    assert found.latents is latents
    assert found.mask is None


def test_generate_repaints_a_part_of_a_file(
    toy_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    noise_image(64, 32).save("image.png")
    half_mask(64, 32).save("mask.png")
    words = ["generate", "--model", "qwen_image", "--model_id", str(toy_of("base"))]
    words += ["--prompt", "a dog", "--height", "32", "--width", "64"]
    words += ["--num_inference_steps", "1", "--input", "input_image=image.png"]
    assert main([*words, "--output", "new.png"]) != 0
    words += ["--input", "inpaint_mask=mask.png"]
    assert main([*words, "--output", "new.png"]) == 0
    with Image.open("new.png") as made:
        assert made.size == (64, 32)
