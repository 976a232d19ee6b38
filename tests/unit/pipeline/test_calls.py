"""Calls of a pipeline generate what was asked for; a bad value is refused by its name."""

from typing import Any

import numpy as np
import pytest
import torch
from dstrain import Frames, Pipeline, UsageError
from dstrain.pipeline import check_measured, checked
from dstrain.plugin import Column, Measured
from PIL import Image

INPUTS: dict[str, Any] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", kind="image", multiple=16),
    "edit_image": Column("edit_image", kind="images"),
    "texts": Column("texts", kind="texts"),
    "layer": Column("layer", kind="image", mode="RGBA"),
    "video": Column("video", kind="video", multiple=16),
    "height": Measured("input_image", "height"),
    "width": Measured("input_image", "width"),
    "count": Measured("input_image", "frames"),
    "frames": Measured("video", "frames"),
    "strength": Column("strength", kind="number"),
}
IMAGE = Image.new("RGB", (32, 16))


def frames(*shape: int, dtype: torch.dtype = torch.uint8) -> Frames:
    return Frames(torch.zeros(shape, dtype=dtype), 16.0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_inference_steps", 0, "got 0"),
        ("seed", 1.5, "integer"),
        ("seed", 2**70, str(2**64 - 1)),
        ("seed", -(2**63) - 1, str(-(2**63))),
        ("guidance_scale", float("nan"), "nan"),
        ("strength", float("inf"), "inf"),
        ("input_image", "a.png", "got str"),
        ("input_image", np.zeros((4, 4, 3)), "got ndarray"),
        ("input_image", Image.new("F", (1, 1), 7), "input_image"),
        ("edit_image", IMAGE, "a list of images"),
        ("edit_image", [IMAGE, "b.png"], "got str"),
        ("video", [IMAGE], "Frames"),
        ("video", frames(2, 16, 16, 3, dtype=torch.float32), "float32 [2, 16, 16, 3]"),
        ("video", frames(0, 16, 16, 3), "[0, 16, 16, 3]"),
    ],
)
def test_a_value_that_is_none_is_named(name: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked(INPUTS, {"unknown": 3, "texts": None, name: value})
    assert caught.value.where == name
    assert said in str(caught.value)


def test_values_that_fit_stay_and_images_get_the_mode_of_their_input() -> None:
    given = {"prompt": "a", "height": np.int64(3), "unknown": 3, "input_image": IMAGE}
    given |= {"strength": None, "seed": 2**64 - 1, "num_inference_steps": 1}
    assert checked(INPUTS, given) == given
    least = {"seed": -(2**63), "texts": ["a", "b"]}
    assert checked(INPUTS, least) == least
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 0))
    found = checked(INPUTS, {"input_image": half, "edit_image": [half], "layer": half})
    assert found["input_image"].getpixel((0, 0)) == (255, 255, 255)
    assert [one.mode for one in found["edit_image"]] == ["RGB"]
    assert found["layer"] is half


@pytest.mark.parametrize(
    ("name", "value", "sides"),
    [
        ("input_image", Image.new("RGB", (70, 32)), "70 x 32.*64 x 32"),
        ("input_image", Image.new("RGB", (64, 9)), "64 x 9.*64 x 16"),
        ("video", frames(1, 33, 32, 3), "32 x 33.*32 x 32"),
    ],
)
def test_sides_that_nothing_resizes_are_refused_with_the_nearest(
    name: str, value: Any, sides: str
) -> None:
    checked(INPUTS, {name: value})
    checked(INPUTS, {"input_image": IMAGE, "layer": IMAGE}, sized=INPUTS)
    with pytest.raises(UsageError, match=f"(?s){name}: .*{sides}"):
        checked(INPUTS, {name: value}, sized=INPUTS)


def test_a_size_that_is_not_that_of_its_image_is_refused() -> None:
    given = {"input_image": IMAGE, "video": frames(5, 16, 32, 3)}
    for name, size in {"height": 16, "width": 32, "count": 1, "frames": 5}.items():
        check_measured(INPUTS, {**given, name: size})
        with pytest.raises(
            UsageError, match=rf"{name}: .*9.*{INPUTS[name].of} .*{size}"
        ):
            check_measured(INPUTS, {**given, name: 9})
    check_measured(INPUTS, {"height": 99})


def test_several_prompts_give_one_image_each_as_if_alone(pipe: Pipeline) -> None:
    def made(negative: Any, **arguments: Any) -> Any:
        size = {"num_inference_steps": 2, "height": 16, "width": 16}
        return pipe(negative_prompt=negative, guidance_scale=3.0, **size, **arguments)

    alone = [made("bad", prompt="dog", seed=3), made("worse", prompt="cat", seed=4)]
    pixels = [one.tobytes() for one in alone]
    both = made(["bad", "worse"], prompt=["dog", "cat"], seed=[3, 4])
    assert [one.tobytes() for one in both] == pixels
    same_seed = made("bad", prompt=("dog", "cat"), seed=3)
    assert same_seed[0].tobytes() == pixels[0]
    assert same_seed[1].tobytes() != pixels[1]
    assert made("bad", prompt=[]) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "prompt_emb(.|\n)*input 'prompt'"),
        ({"prompt": ["dog"], "seed": [1, 2]}, "seed: .*2 .*1"),
        ({"promt": "dog"}, "'promt'.*'prompt'"),
        ({"prompt": "dog", "rand_device": "mps"}, "rand_device: .*'mps'"),
        ({"prompt": "dog", "mood": "calm"}, "(?s)'mood'.*other"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(
    arguments: dict[str, Any], said: str, pipe: Pipeline
) -> None:
    with pytest.raises(UsageError, match=said):
        pipe(**arguments)


@pytest.mark.parametrize(
    ("latents", "got"), [(torch.zeros(4, 2, 3), r"\[4, 2, 3\]"), ([0.0], "list")]
)
def test_latents_of_another_shape_are_refused(
    latents: Any, got: str, pipe: Pipeline
) -> None:
    with pytest.raises(UsageError, match=rf"latents: .*\[1, 4, 2, 3\], got {got}"):
        pipe(prompt="dog", height=16, width=24, latents=latents)


def test_a_lora_needs_a_number_as_scale(pipe: Pipeline) -> None:
    with pytest.raises(UsageError, match=r"load_lora\(\): scale: .*nan"):
        pipe.load_lora("a", float("nan"))
