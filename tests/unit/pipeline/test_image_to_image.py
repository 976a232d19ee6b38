"""Inference may start from what a variant learns to generate, in the size of that."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import Frames, Pipeline, UsageError
from dstrain.pipeline import SamplerOptions, plan_inference, seeded_noise, start_input
from dstrain.pipeline.image_to_image import check_start, fitted_start
from dstrain.plugin import Column
from PIL import Image
from torch import Tensor

from tests.support.family import build

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


@pytest.mark.parametrize("strength", [0, -0.5, 1.01, float("nan")])
def test_a_share_outside_its_range_is_refused(strength: float) -> None:
    with pytest.raises(UsageError, match="denoising_strength: expected a number above"):
        SamplerOptions(4, denoising_strength=strength)
    with pytest.raises(UsageError, match="leaves none of 4 steps"):
        SamplerOptions(4, denoising_strength=1e-20)


def test_the_whole_schedule_forgets_the_picture(pipe: Pipeline) -> None:
    plain = states(pipe, seed=3)
    wanted = states(pipe, seed=3, input_image=picture(16, 16), denoising_strength=1.0)
    assert all(map(torch.equal, plain, wanted))


def test_a_part_of_it_begins_at_the_noisy_picture(pipe: Pipeline) -> None:
    image = picture(16, 16)
    two = states(pipe, seed=3, input_image=image, denoising_strength=0.5)
    other = states(
        pipe,
        seed=3,
        input_image=picture(16, 16, "L").convert("RGB"),
        denoising_strength=0.5,
    )
    assert len(two) == 2
    assert not torch.equal(two[-1], other[-1])
    sigma = pipe.spec.schedule.sigmas(4, 4)[2]
    encode = pipe.spec.makers["input_latents"]
    latents = encode.run({"input_image": image}, pipe.bind_components(encode))
    begun: list[Tensor] = []
    predict = pipe.predict
    pipe.predict = lambda values, noisy, *rest: (
        begun.append(noisy) or predict(values, noisy, *rest)
    )  # type: ignore[method-assign,func-returns-value]  # replaced in this test alone
    states(pipe, seed=3, input_image=image, denoising_strength=0.5)
    noise = seeded_noise((1, 4, 2, 2), 3)
    wanted = sigma * noise + (1 - sigma) * latents["input_latents"]
    assert torch.equal(begun[0], wanted)


@pytest.mark.parametrize(
    ("size", "given", "wanted"),
    [
        ((40, 27), {}, (24, 40)),
        ((40, 27), {"height": 32, "width": 24}, (32, 24)),
        ((2000, 2000), {}, (1024, 1024)),
    ],
)
def test_a_picture_is_scaled_and_cropped_as_a_dataset_would_be(
    size: tuple[int, int], given: dict[str, int], wanted: tuple[int, int]
) -> None:
    spec = build("base")
    given = {"input_image": picture(*size, "L"), **given}
    fitted = fitted_start(spec, {**spec.defaults, **given}, given)
    image = fitted["input_image"]
    assert (image.height, image.width) == wanted
    assert image.mode == "RGB"
    assert (fitted["height"], fitted["width"]) == wanted


def test_what_cannot_be_a_start_is_refused_in_words() -> None:
    spec = build("base")
    for given, words in (
        ("image.png", "expected an image of Pillow, got str"),
        (picture(7, 40), "40 x 7 .* is too small or too elongated"),
    ):
        with pytest.raises(UsageError, match=words):
            fitted_start(spec, {"input_image": given}, {})
    below_0 = {"input_image": picture(16, 16), "height": -16, "width": 16}
    with pytest.raises(UsageError, match="height: expected a multiple of 8, got -16"):
        fitted_start(spec, below_0, below_0)
    one = {"input_image": picture(16, 16), "height": 16}
    with pytest.raises(
        UsageError, match="height and width: width is absent; give both"
    ):
        fitted_start(spec, {**spec.defaults, **one}, one)


def test_a_strength_needs_a_picture_and_a_variant_that_learns_one() -> None:
    spec = build("base")
    assert start_input(spec) == "input_image"
    with pytest.raises(
        UsageError, match="needs input 'input_image', the image to start"
    ):
        plan_inference(spec, {"prompt": "dog", "denoising_strength": 0.5})
    several = {**spec.inputs, "input_image": Column("image", "images", multiple=8)}
    without = replace(spec, inputs=several)
    assert not start_input(without)
    with pytest.raises(UsageError, match="does not start from one image or video"):
        check_start(without, {"input_image": []})


def test_without_a_strength_no_unit_encodes_the_picture() -> None:
    spec = build("base")
    given = {"prompt": "dog", "input_image": ""}
    assert "input_image" not in plan_inference(spec, given).plan.used_inputs
    started = plan_inference(spec, {**given, "denoising_strength": 0.5}).plan
    assert "input_image" in started.used_inputs


def test_a_video_is_no_image() -> None:
    spec = build("base")
    video = Frames(torch.zeros(1, 16, 16, 3, dtype=torch.uint8), 16.0)
    with pytest.raises(UsageError, match=r"input_image: expected .*, got Frames"):
        fitted_start(spec, {"input_image": video}, {})
