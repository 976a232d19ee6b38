"""The family's pipeline spec: equal to diffusers' pipeline, also for several prompts and many
steps; its sides.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from dstrain import SFT, Pipeline, UsageError
from dstrain.graph import make_plan
from dstrain.graph.plan import value_key
from dstrain_qwen_image import MODEL
from dstrain_qwen_image.model_fn import pack
from dstrain_qwen_image.pipeline import PIPELINES, SCHEDULE
from torch import Tensor

from tests.support.published_steps import add_to, assert_equal_steps

PROMPTS = (
    "a red apple on a table",
    "x",
    "two dogs that run over a long bridge in the rain at night",
)
NEGATIVES = ("blurry, ugly, low quality and many other words", " ", "bad hands")


def encode(prompts: tuple[str, ...], loaded: dict[str, Any]) -> dict[str, Tensor]:
    """Encode prompts one by one, then pad them with zeros to the longest."""
    unit = MODEL.spec("base").units[0]
    rows = [unit.run({"prompt": prompt}, loaded) for prompt in prompts]
    length = max(row["prompt_emb"].shape[1] for row in rows)
    for row in rows:
        rest = length - row["prompt_emb"].shape[1]
        row["prompt_emb"] = torch.nn.functional.pad(row["prompt_emb"], (0, 0, 0, rest))
        row["prompt_mask"] = torch.nn.functional.pad(row["prompt_mask"], (0, rest))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@torch.no_grad()
def denoise(
    noise: Tensor,
    prompts: tuple[str, ...],
    negatives: tuple[str, ...],
    scale: float,
    steps: int,
    loaded: dict[str, Any],
) -> list[Tensor]:
    """Euler steps from noise; returns the latents after each."""
    spec = MODEL.spec("base")
    sigmas = spec.schedule.sigmas(
        steps, noise[0, 0].numel() // spec.schedule.latents_per_token
    )
    positive, negative = (
        encode(prompts, loaded),
        encode(negatives, loaded) if negatives else None,
    )
    latents, passed = noise, []
    for now, then in pairwise(sigmas):
        timestep = (now * 1000).expand(len(latents))
        prediction = spec.model_fn.function(
            latents, timestep, **positive, dit=loaded["dit"]
        )
        if negative:
            other = spec.model_fn.function(
                latents, timestep, **negative, dit=loaded["dit"]
            )
            prediction = spec.apply_guidance(prediction, other, scale)
        latents = latents + (then - now) * prediction
        passed.append(latents)
    return passed


def by_pipe(
    noise: Tensor,
    guided: bool,
    size: tuple[int, int],
    steps: int,
    loaded: dict[str, Any],
) -> tuple[list[Tensor], Any]:
    """The latents after each step of a call of the pipeline, and its image."""
    components = {
        name: loaded[name] for name in ("dit", "text_encoder", "vae", "tokenizer")
    }
    pipe, passed = Pipeline(MODEL.spec("base"), MODEL, components), []
    image = pipe(
        prompt=PROMPTS[0],
        negative_prompt=NEGATIVES[0] if guided else None,
        guidance_scale=4.0,
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        latents=noise,
        on_step=lambda i, latents: passed.append(latents),
    )
    return passed, image


@pytest.mark.parametrize(
    ("count", "guided", "size", "steps"),
    [
        (1, False, (64, 96), 6),
        (1, True, (64, 96), 6),
        (3, False, (32, 32), 6),
        (3, True, (64, 64), 6),
        (1, True, (128, 64), 40),
        (1, False, (256, 256), 40),
    ],
)
def test_every_step_equals_that_of_diffusers(
    count: int,
    guided: bool,
    size: tuple[int, int],
    steps: int,
    toy_folder: Path,
    loaded: dict[str, Any],
) -> None:
    with torch.no_grad():  # the default initialization hardly uses the prompt
        for weight in loaded["dit"].parameters():
            weight.mul_(2 if weight.ndim > 1 else 1)
    parts = {name: loaded[name] for name in ("text_encoder", "tokenizer", "vae")}
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        toy_folder / "scheduler"
    )
    published = QwenImagePipeline(
        **parts, transformer=loaded["dit"], scheduler=scheduler
    )
    published.set_progress_bar_config(disable=True)
    noise = torch.randn(
        count,
        16,
        1,
        size[0] // 8,
        size[1] // 8,
        generator=torch.Generator().manual_seed(5),
    )
    wanted: list[Tensor] = []

    image = published(
        prompt=list(PROMPTS[:count]),
        negative_prompt=list(NEGATIVES[:count]) if guided else None,
        true_cfg_scale=4.0 if guided else 1.0,
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        latents=pack(noise),
        callback_on_step_end=add_to(wanted),
    ).images[0]
    if count == 1:
        made, made_image = by_pipe(noise, guided, size, steps, loaded)
    else:
        made = denoise(
            noise,
            PROMPTS[:count],
            NEGATIVES[:count] if guided else (),
            4.0,
            steps,
            loaded,
        )
        with torch.no_grad():
            made_image = (
                MODEL.spec("base")
                .decoders[0]
                .function(made[-1][:1], vae=loaded["vae"])["image"]
            )
    assert_equal_steps([pack(latents) for latents in made], wanted, steps)
    difference = np.abs(np.asarray(made_image, int) - np.asarray(image, int)).max()
    assert difference <= (count > 1)


def test_the_toy_listens_to_its_prompt(loaded: dict[str, Any]) -> None:
    noise = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    one, other = (
        denoise(noise, (prompt,), (), 1.0, 2, loaded)[-1] for prompt in PROMPTS[:2]
    )
    assert (one - other).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("steps", "tokens"), [(2, 4), (6, 24), (40, 256), (50, 4096), (50, 8192)]
)
def test_sigmas_are_bit_equal_to_the_published_scheduler(
    steps: int, tokens: int, toy_folder: Path
) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        toy_folder / "scheduler"
    )
    scheduler.set_timesteps(
        sigmas=np.linspace(1.0, 1 / steps, steps), mu=SCHEDULE.mu(tokens)
    )
    assert torch.equal(scheduler.sigmas, SCHEDULE.sigmas(steps, tokens))
    assert torch.equal(scheduler.timesteps, SCHEDULE.sigmas(steps, tokens)[:-1] * 1000)


def test_a_dataset_without_images_is_refused_by_its_column() -> None:
    with pytest.raises(UsageError, match="no column 'image'"):
        make_plan(MODEL.spec("base"), frozenset({"prompt"}), SFT, ("dit",))


def test_the_record_names_the_variants_that_are_wired() -> None:
    assert [MODEL.spec(variant).variant for variant in MODEL.variants] == list(
        PIPELINES
    )


def test_sides_and_padding_name_what_they_should() -> None:
    spec = MODEL.spec("base")
    assert spec.branched == {"prompt", "prompt_emb", "prompt_mask"}
    assert value_key(spec, "prompt_emb", "negative") == "negative.prompt_emb"
    assert spec.padded == {"prompt_emb": 1, "prompt_mask": 1}


def test_a_folder_that_fits_several_variants_is_loaded_as_the_one_for_a_prompt(
    toy_folder: Path,
) -> None:
    pipe = Pipeline.from_pretrained(str(toy_folder))
    assert pipe.spec.variant == "base"
    with pytest.raises(UsageError, match="takes no argument 'edit_image'") as caught:
        pipe(prompt=PROMPTS[0], edit_image=[])
    assert "an input of edit, edit-2509, edit-2511" in str(caught.value)
    wanted = r"\[1, 16, 1, 4, 8\] \(1, channels, 1, height 32 / 8, width 64"
    with pytest.raises(UsageError, match=f"latents: .*{wanted}"):
        pipe(prompt="", latents=torch.zeros(1, 16, 4, 8), height=32, width=64)
