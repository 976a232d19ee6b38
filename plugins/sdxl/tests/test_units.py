"""Units give what diffusers' pipelines give: blank prompts, layers of the text encoders, and
a VAE that is in fp32 whatever the precision of the run.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.image_processor import VaeImageProcessor
from dstrain import Pipeline
from dstrain.plugin import InputError
from dstrain.testing.compare import EXACT
from torch import Tensor

from tests.support.noise_images import noise_image
from tests.support.published_steps import add_to
from tests.support.toys import opened, toy

# Of numpy, about how the schedulers of diffusers convert tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
SIZES = {"height": 32, "width": 40}
NOISE = torch.randn((1, 4, 4, 5), generator=torch.Generator().manual_seed(3))


def made(pipe: Pipeline, unit: str, branch: str = "positive", **inputs: Any) -> Any:
    """Return what a unit makes in a branch."""
    (found,) = (one for one in pipe.spec.units if one.name == unit)
    return found.run(inputs, pipe.bind_components(found, branch=branch))


def published(pipe: Pipeline, kind: Any = StableDiffusionXLPipeline) -> Any:
    """Return a pipeline of diffusers with the networks of ours."""
    folder = toy("sdxl", "base") / "scheduler"
    scheduler = EulerDiscreteScheduler.from_pretrained(folder)
    built = kind(scheduler=scheduler, add_watermarker=False, **pipe.components)
    built.set_progress_bar_config(disable=True)
    return built


def steps_of(pipeline: Any, **given: Any) -> list[Tensor]:
    """Return the latents after each step of a pipeline of diffusers."""
    passed: list[Tensor] = []
    pipeline("a dog", callback_on_step_end=add_to(passed), **given)
    return passed


@torch.no_grad()
@pytest.mark.parametrize("prompt", ["a dog", "", " "])
@pytest.mark.parametrize("branch", ["positive", "negative"])
@pytest.mark.parametrize("clip_skip", [2, 3])
def test_a_prompt_is_encoded_as_diffusers_encodes_it(
    prompt: str, branch: str, clip_skip: int
) -> None:
    """A blank negative one is none there, for which it has zeros."""
    pipe = opened("sdxl", "base")
    is_none = branch == "negative" and not prompt
    states, none, pooled, pooled_of_none = published(pipe).encode_prompt(
        prompt or "", negative_prompt=None, clip_skip=clip_skip - 2
    )
    if is_none:
        states, pooled = none, pooled_of_none
    given = {"branch": branch, "prompt": prompt, "clip_skip": clip_skip}
    first = made(pipe, "encode_prompt", **given)
    second = made(pipe, "encode_prompt_2", **given)
    found = torch.cat([first["clip_emb"], second["open_clip_emb"]], dim=-1)
    assert torch.equal(found, states)
    assert torch.equal(second["pooled_emb"], pooled)
    assert bool(found.any()) != is_none


def test_a_clip_skip_of_more_layers_than_there_are_is_refused() -> None:
    given = {"branch": "positive", "prompt": "a dog", "clip_skip": 12}
    with pytest.raises(InputError, match="clip_skip"):
        made(opened("sdxl", "base"), "encode_prompt", **given)


@torch.no_grad()
@pytest.mark.parametrize("start", [None, 0.5])
def test_steps_without_a_negative_prompt_are_those_of_diffusers(
    start: float | None,
) -> None:
    """From noise, and from an image."""
    pipe = opened("sdxl", "base")
    image, kind = noise_image(40, 32), StableDiffusionXLPipeline
    ours: list[Tensor] = []
    given: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0}
    own: dict[str, Any] = {}
    theirs = given | SIZES
    if start is not None:
        own = {"input_image": image, "denoising_strength": start}
        kind = StableDiffusionXLImg2ImgPipeline
        theirs = given | {"image": image, "strength": start}
    pipe(
        prompt="a dog",
        latents=NOISE,
        on_step=lambda _, latents: ours.append(latents),
        **SIZES,
        **given,
        **own,
    )
    other = published(pipe, kind)
    if start is None:
        theirs["latents"] = NOISE
    else:
        encoded = made(pipe, "encode_image", input_image=image)["input_latents"]
        other.scheduler.set_timesteps(4)
        begin = other.scheduler.timesteps[2:3]
        other.scheduler.set_begin_index(2)
        theirs["latents"] = other.scheduler.add_noise(encoded, NOISE, begin)
    wanted = steps_of(other, **theirs)
    assert len(wanted) == (4 if start is None else 2)
    for one, expected in zip(ours, wanted, strict=True):
        near = EXACT * float(expected.abs().max())
        torch.testing.assert_close(one, expected, rtol=0, atol=near)


@torch.no_grad()
@pytest.mark.parametrize("upcast", [True, False])
def test_the_vae_is_in_fp32_where_its_configuration_says_so(
    upcast: bool, tmp_path: Path
) -> None:
    folder = shutil.copytree(toy("sdxl", "base"), tmp_path / "toy")
    place = folder / "vae/config.json"
    config = json.loads(place.read_bytes()) | {"force_upcast": upcast}
    place.write_text(json.dumps(config))
    pipe = Pipeline.from_pretrained(folder, variant="base", torch_dtype=torch.bfloat16)
    kinds = {name: pipe.components[name].dtype for name in ("unet", "vae")}
    dtype = torch.float32 if upcast else torch.bfloat16
    assert kinds == {"unet": torch.bfloat16, "vae": dtype}
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=dtype)
    image = noise_image(40, 32)
    pixels = VaeImageProcessor().preprocess(image).to(dtype)
    wanted = vae.encode(pixels).latent_dist.mode().float() * vae.config.scaling_factor
    found = made(pipe, "encode_image", input_image=image)["input_latents"]
    assert torch.equal(found, wanted)
