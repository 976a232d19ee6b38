"""Inference may start from what a variant learns to generate, in the size of that."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import Frames, Pipeline, UsageError
from dstrain.pipeline import SamplerOptions, seeded_noise, start_input
from dstrain.plugin import Column
from PIL import Image
from torch import Tensor

pytestmark = pytest.mark.usefixtures("tiny")


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def states(pipe: Pipeline, **arguments: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    pipe(prompt="dog", on_step=lambda _, latents: seen.append(latents), **arguments)
    return seen


def test_the_first_step_is_the_one_at_which_the_noise_is_the_asked_share() -> None:
    taken = {
        strength: SamplerOptions(4, denoising_strength=strength).steps_taken
        for strength in (None, 1.0, 0.76, 0.75, 0.5, 0.01)
    }
    assert taken == {None: 4, 1.0: 4, 0.76: 4, 0.75: 3, 0.5: 2, 0.01: 1}


@pytest.mark.parametrize("strength", [0, -0.5, 1.01, float("nan"), 1e-20])
def test_a_share_that_leaves_no_step_is_refused(strength: float) -> None:
    with pytest.raises(UsageError, match="denoising_strength"):
        SamplerOptions(4, denoising_strength=strength)


def test_a_part_of_it_begins_at_the_noisy_picture(pipe: Pipeline) -> None:
    image = picture(16, 16)
    encode = pipe.spec.makers["input_latents"]
    latents = encode.run({"input_image": image}, pipe.bind_components(encode))
    begun: list[Tensor] = []
    denoiser = pipe.components["dit"]
    denoiser.register_forward_pre_hook(lambda _, given: begun.append(given[0]))
    made = states(pipe, seed=3, input_image=image, denoising_strength=0.5)
    sigma = pipe.spec.schedule.sigmas(4, 4)[2]
    noise = seeded_noise((1, 4, 2, 2), 3)
    wanted = sigma * noise + (1 - sigma) * latents["input_latents"]
    assert torch.equal(begun[0], wanted)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("size", "given", "wanted"),
    [
        ((40, 27), {}, (40, 24)),
        ((40, 27), {"height": 32, "width": 24}, (24, 32)),
        ((2000, 2000), {}, (1024, 1024)),
    ],
)
def test_a_picture_is_scaled_and_cropped_as_a_dataset_would_be(
    size: tuple[int, int],
    given: dict[str, int],
    wanted: tuple[int, int],
    pipe: Pipeline,
) -> None:
    encoded: list[Tensor] = []
    encoder = pipe.components["vae"].encoder
    encoder.register_forward_pre_hook(lambda _, given: encoded.append(given[0]))
    given = {"denoising_strength": 0.5, "num_inference_steps": 2, **given}
    made = pipe(prompt="dog", input_image=picture(*size, "L"), **given)
    assert encoded[0].shape == (1, 3, *wanted[::-1])
    assert made.size == wanted


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "'input_image'"),
        ({"input_image": Frames(torch.zeros(1, 16, 16, 3), 16.0)}, "input_image: "),
        ({"input_image": picture(7, 40)}, "40 x 7 .*height and width"),
        (
            {"input_image": picture(16, 16), "height": -16, "width": 16},
            "height: .*8.*-16",
        ),
        ({"input_image": picture(16, 16), "height": 16}, "height and width: width"),
        ({"input_image": picture(16, 16), "width": 16}, "height and width: height"),
    ],
)
def test_what_cannot_be_a_start_is_refused_by_name(
    given: dict[str, Any], named: str, pipe: Pipeline
) -> None:
    with pytest.raises(UsageError, match=f"(?s){named}"):
        pipe(prompt="dog", denoising_strength=0.5, **given)


def test_a_strength_needs_a_variant_that_learns_one_picture(pipe: Pipeline) -> None:
    assert start_input(pipe.spec) == "input_image"
    assert not start_input(replace(pipe.spec, units=pipe.spec.units[:1]))
    several = Column("image", "images", multiple=8)
    inputs = {**pipe.spec.inputs, "input_image": several}
    pipe.spec = replace(pipe.spec, inputs=inputs)
    assert not start_input(pipe.spec)
    with pytest.raises(UsageError) as refused:
        pipe(prompt="dog", denoising_strength=0.5, input_image=[])
    assert refused.value.where == "denoising_strength"
