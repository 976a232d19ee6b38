"""The family's pipeline spec: equal to diffusers' pipelines, its schedule, and what losses
reach.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxPipeline
from dstrain import SFT, Pipeline, Rng, SampleKey, TimestepSampler, UsageError
from dstrain.graph import make_plan
from dstrain.models import pack
from dstrain.plugin import LatentConstraint
from dstrain_flux import MODEL
from dstrain_flux.pipeline import PIPELINES, SCHEDULE
from dstrain_flux.toy import write
from PIL import Image
from torch import Tensor

from tests.support.noise_images import smooth_noise
from tests.support.published_steps import add_to, assert_equal_steps

PARTS = ("dit", "text_encoder_1", "text_encoder_2", "vae", "tokenizer_1", "tokenizer_2")
PROMPT, NEGATIVE = "a dog and the cat on a red table", "blurry, ugly"


def published(kind: type[Any], loaded: dict[str, Any], toy_folder: Path) -> Any:
    """diffusers' pipeline on the same components."""
    pipeline = kind(
        transformer=loaded["dit"],
        text_encoder=loaded["text_encoder_1"],
        text_encoder_2=loaded["text_encoder_2"],
        tokenizer=loaded["tokenizer_1"],
        tokenizer_2=loaded["tokenizer_2"],
        vae=loaded["vae"],
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
            toy_folder / "scheduler"
        ),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def by_diffusers(
    pipeline: Any, noise: Tensor, **arguments: Any
) -> tuple[list[Tensor], Image.Image]:
    """The latents after each step of diffusers' pipeline, packed, and its image."""
    passed: list[Tensor] = []

    images = pipeline(
        prompt=PROMPT,
        latents=pack(noise),
        callback_on_step_end=add_to(passed),
        **arguments,
    ).images
    return passed, images[0]


def by_pipe(
    variant: str, loaded: dict[str, Any], noise: Tensor, **arguments: Any
) -> tuple[list[Tensor], Image.Image]:
    """The latents after each step of ours, packed, and its image."""
    pipe = Pipeline(MODEL.spec(variant), MODEL, {name: loaded[name] for name in PARTS})
    passed: list[Tensor] = []
    image = pipe(
        prompt=PROMPT,
        latents=noise,
        on_step=lambda i, latents: passed.append(pack(latents)),
        **arguments,
    )
    return passed, image


def sharpen(loaded: dict[str, Any]) -> None:
    """Make the prompts matter: with the default initialization the denoiser hardly uses
    them.
    """
    with torch.no_grad():
        for weight in loaded["dit"].parameters():
            weight.mul_(2 if weight.ndim > 1 else 1)


def assert_equal(
    ours: tuple[list[Tensor], Any], theirs: tuple[list[Tensor], Any], steps: int
) -> None:
    assert_equal_steps(ours[0], theirs[0], steps)
    assert np.array_equal(np.asarray(ours[1]), np.asarray(theirs[1]))


@pytest.mark.parametrize(
    ("scale", "size", "steps"),
    [(1.0, (64, 96), 6), (3.0, (64, 96), 4), (1.0, (32, 32), 2), (2.0, (128, 64), 2)],
)
def test_every_step_equals_that_of_flux_pipeline(
    scale: float,
    size: tuple[int, int],
    steps: int,
    toy_folder: Path,
    loaded: dict[str, Any],
) -> None:
    sharpen(loaded)
    noise = torch.randn(
        1, 16, size[0] // 8, size[1] // 8, generator=torch.Generator().manual_seed(5)
    )
    common = {
        "height": size[0],
        "width": size[1],
        "num_inference_steps": steps,
        "negative_prompt": NEGATIVE,
    }
    pipeline = published(FluxPipeline, loaded, toy_folder)
    theirs = by_diffusers(
        pipeline, noise, true_cfg_scale=scale, guidance_scale=3.5, **common
    )
    assert_equal(
        by_pipe("dev", loaded, noise, guidance_scale=scale, **common), theirs, steps
    )


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_every_step_equals_that_of_flux_kontext_pipeline(
    scale: float, toy_folder: Path, loaded: dict[str, Any]
) -> None:
    """An image of the size to which both would resize it: that they choose the same
    one is tested with the units.
    """
    sharpen(loaded)
    noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(5))
    reference, steps = smooth_noise(80, 48), 3
    common = {
        "height": 64,
        "width": 64,
        "num_inference_steps": steps,
        "negative_prompt": NEGATIVE,
    }
    pipeline = published(FluxKontextPipeline, loaded, toy_folder)
    theirs = by_diffusers(
        *(pipeline, noise),
        **{
            "image": reference,
            "true_cfg_scale": scale,
            "guidance_scale": 2.5,
            "max_area": 64 * 64,
            **common,
        },
        _auto_resize=False,
    )
    given = {"kontext_images": [reference], "kontext_pixels": 64 * 64}
    assert_equal(
        by_pipe("kontext", loaded, noise, guidance_scale=scale, **given, **common),
        theirs,
        steps,
    )


def test_at_the_published_area_kontext_equals_diffusers_from_an_image_of_any_size(
    toy_folder: Path, loaded: dict[str, Any]
) -> None:
    """Of this size, an image whose tensor has another memory format gets other
    latents.
    """
    sharpen(loaded)
    noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(5))
    common = {"height": 64, "width": 64, "num_inference_steps": 1}
    pipeline, reference = (
        published(FluxKontextPipeline, loaded, toy_folder),
        smooth_noise(300, 130),
    )
    theirs = by_diffusers(
        pipeline, noise, image=reference, guidance_scale=2.5, max_area=64 * 64, **common
    )
    assert_equal(
        by_pipe("kontext", loaded, noise, kontext_images=[reference], **common),
        theirs,
        1,
    )


def test_a_denoiser_without_embedded_guidance_gets_none_and_equals_diffusers(
    tmp_path: Path, opened: Callable[[Path], dict[str, Any]]
) -> None:
    write(tmp_path, sizes={"dit": {"guidance_embeds": False}})
    loaded = opened(tmp_path)
    noise = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(5))
    common = {"height": 32, "width": 32, "num_inference_steps": 2}
    theirs = by_diffusers(published(FluxPipeline, loaded, tmp_path), noise, **common)
    assert_equal(by_pipe("dev", loaded, noise, **common), theirs, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "x"},
        {"embedded_guidance": 1.0},
        {"kontext_images": [smooth_noise(64, 64, 1)]},
    ],
)
def test_the_toy_listens_to_what_it_is_given(
    change: dict[str, Any], loaded: dict[str, Any]
) -> None:
    sharpen(loaded)
    pipe = Pipeline(
        MODEL.spec("kontext"), MODEL, {name: loaded[name] for name in PARTS}
    )
    given = {
        "prompt": PROMPT,
        "height": 64,
        "width": 64,
        "num_inference_steps": 1,
        "kontext_pixels": 64 * 64,
    }
    passed: list[Tensor] = []
    for arguments in ({}, change):
        images = {"kontext_images": [smooth_noise(64, 64)]}
        pipe(
            **{**given, **images, **arguments},
            on_step=lambda i, latents: passed.append(latents),
        )
    assert (passed[0] - passed[1]).abs().max() > 1e-2


@pytest.mark.parametrize(("steps", "tokens"), [(2, 4), (6, 24), (28, 256), (50, 4096)])
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


def test_training_draws_from_diffsynths_table() -> None:
    """Shift 3 over 1000 values from 1 to sigma_min = .003 / 1.002, whatever the size."""
    plain = np.linspace(1.0, 0.003 / 1.002, 1000)
    shifted = 3 * plain / (1 + 2 * plain)
    assert np.abs(SCHEDULE.table.numpy() - shifted).max() < 1e-7


def test_the_record_names_the_variants_that_are_wired() -> None:
    assert [MODEL.spec(variant).variant for variant in MODEL.variants] == list(
        PIPELINES
    )


@pytest.mark.parametrize(
    ("variant", "missing"), [("dev", "image"), ("kontext", "kontext_images")]
)
def test_a_dataset_without_its_images_is_refused_by_its_column(
    variant: str, missing: str
) -> None:
    spec = MODEL.spec(variant)
    present = frozenset(
        name
        for name, source in spec.inputs.items()
        if getattr(source, "name", "") != missing
    )
    with pytest.raises(UsageError, match=f"no column '{missing}'"):
        make_plan(spec, present - {"height", "width"}, SFT, ("dit",))


def test_stage_1_needs_no_denoiser_nor_what_is_beside_it() -> None:
    for variant in PIPELINES:
        spec = MODEL.spec(variant)
        plan = make_plan(spec, frozenset(spec.inputs), SFT, ("dit",))
        assert not any(
            name.startswith(("dit", "controlnet", "ipadapter"))
            for step in plan.cached_steps
            for name in step.unit.components
        )


@pytest.mark.parametrize("variant", ["dev", "kontext"])
def test_a_loss_reaches_every_parameter(variant: str, loaded: dict[str, Any]) -> None:
    """So nothing is listed as unused_parameters."""
    spec = MODEL.spec(variant)
    trained = ("dit", "text_encoder_1", "text_encoder_2")
    for name in trained:
        loaded[name].requires_grad_(True)
    values: dict[str, Any] = {
        "prompt": PROMPT,
        "input_image": smooth_noise(48, 32),
        "kontext_images": [smooth_noise(32, 48)],
    }
    values["kontext_pixels"] = 32 * 32
    for unit in spec.units:
        values |= unit.run({name: values[name] for name in unit.inputs}, loaded)
    reads = {name: values[name] for name in spec.model_fn.inputs if name in values}
    loss = SFT.loss.function(
        lambda noisy_latents, timestep: spec.model_fn.function(
            noisy_latents, timestep, **reads, dit=loaded["dit"]
        ),
        values["input_latents"],
        timestep_sampler=TimestepSampler(spec.schedule),
        constrain_latents=LatentConstraint,
        rng=Rng([SampleKey(0, 0, 0, 0)]),
    )
    loss.sum().backward()
    for name in trained:
        weights = dict(loaded[name].named_parameters())
        assert [
            n
            for n, weight in weights.items()
            if weight.grad is None or not weight.grad.any()
        ] == []
        assert spec.unused_parameters.get(name, ()) == ()


def test_both_halves_of_the_text_are_per_branch() -> None:
    assert MODEL.spec("kontext").branched == {"prompt", "pooled_emb", "prompt_emb"}


def test_a_folder_that_fits_several_variants_is_loaded_as_the_one_for_a_prompt(
    toy_folder: Path,
) -> None:
    pipe = Pipeline.from_pretrained(str(toy_folder))
    assert pipe.spec.variant == "dev"
    wanted = r"\[1, 16, 4, 8\] \(1, channels, height 32 / 8, width 64 / 8\)"
    packed = torch.zeros(1, 8, 64)
    with pytest.raises(UsageError, match=f"latents: .*{wanted}, got \\[1, 8, 64\\]"):
        pipe(prompt="", latents=packed, height=32, width=64)
