"""What a script gives for an input is checked, and what is wrong is said in words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import Frames, UsageError
from dstrain.pipeline import check_measured, checked
from dstrain.pipeline.arguments import one_by_one
from dstrain.plugin import Column, Measured
from PIL import Image

INPUTS = {
    "prompt": Column("prompt"),
    "input_image": Column("image", kind="image", multiple=16),
    "edit_image": Column("edit_image", kind="images"),
    "layer": Column("layer", kind="image", mode="RGBA"),
    "video": Column("video", kind="video", multiple=16),
    "height": Measured("input_image", "height"),
    "strength": Column("strength", kind="number"),
}
IMAGE = Image.new("RGB", (32, 16))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("prompt", 3, "expected text (str), got int 3"),
        ("height", "512", "expected a whole number (int), got str '512'"),
        ("height", 64.0, "expected a whole number (int), got float 64.0"),
        ("height", True, "expected a whole number (int), got bool True"),
        ("strength", "a", "expected a number, got str 'a'"),
        ("seed", 1.5, "expected a whole number (int), got float 1.5"),
        ("num_inference_steps", 0, "expected 1 or more, got 0"),
        ("seed", 2**70, "expected -9223372036854775808 to 18446744073709551615, got 1"),
        ("guidance_scale", float("nan"), "expected a finite number, got nan"),
        ("strength", float("inf"), "expected a finite number, got inf"),
        (
            "video",
            Frames(torch.zeros(2, 3, 16, 16, dtype=torch.uint8), 16.0),
            "got uint8 [2, 3, 16, 16]\n  put the channels last",
        ),
        (
            "video",
            Frames(torch.zeros(2, 16, 16, 3), 16.0),
            "expected frames of uint8 (frames, height, width, 3), got float32 [2, 16",
        ),
        ("guidance_scale", "4", "expected a number, got str '4'"),
        ("input_image", "a.png", "got str 'a.png'\n  open it: Image.open('a.png')"),
        ("input_image", Path("a.png"), "got PosixPath a.png\n  open it"),
        (
            "input_image",
            np.zeros((4, 4, 3)),
            "got ndarray of shape [4, 4, 3]\n  make one of it: Image.fromarray",
        ),
        ("edit_image", IMAGE, "expected a list of images (PIL.Image.Image), got Image"),
        ("edit_image", [IMAGE, "b.png"], "got str 'b.png'\n  open it"),
        ("video", [IMAGE], "expected a video (Frames), got list"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_makes_the_right_one(
    name: str, value: Any, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        checked(INPUTS, {name: value})
    assert f"error: {name}: " in str(caught.value)
    assert words in str(caught.value)


def test_values_that_fit_are_left_alone_and_images_get_the_mode_of_their_input() -> (
    None
):
    given = {"prompt": "a", "height": np.int64(3), "unknown": 3, "input_image": IMAGE}
    assert checked(INPUTS, given | {"strength": None}) == {**given, "strength": None}
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 0))
    found = checked(INPUTS, {"input_image": half, "edit_image": [half], "layer": half})
    assert found["input_image"].getpixel((0, 0)) == (255, 255, 255)
    assert [one.mode for one in found["edit_image"]] == ["RGB"]
    assert found["layer"] is half
    with pytest.raises(UsageError, match="input_image: float values outside"):
        checked(INPUTS, {"input_image": Image.new("F", (1, 1), 7)})


def test_sides_that_nothing_resizes_are_refused_with_the_nearest() -> None:
    odd = Image.new("RGB", (70, 33))
    frames = Frames(torch.zeros(1, 33, 32, 3, dtype=torch.uint8), 16.0)
    checked(INPUTS, {"input_image": odd})
    for name, value, words in (
        (
            "input_image",
            odd,
            r"is 70 x 33 \(width x height\).*multiples of 16\n  .*64 x 32",
        ),
        ("video", frames, "crop or resize it to 32 x 32"),
    ):
        with pytest.raises(UsageError, match=words):
            checked(INPUTS, {name: value}, sized=INPUTS)


def test_a_size_that_is_not_that_of_its_image_is_refused() -> None:
    check_measured(INPUTS, {"input_image": IMAGE, "height": 16})
    check_measured(INPUTS, {"height": 99})
    with pytest.raises(UsageError, match="height: is 32, but input_image has 16"):
        check_measured(INPUTS, {"input_image": IMAGE, "height": 32})


def test_several_prompts_have_one_value_for_all_or_one_each() -> None:
    given = {"prompt": ["a", "b"], "seed": [1, 2], "height": 3}
    assert one_by_one(given) == [
        {"prompt": "a", "seed": 1, "height": 3},
        {"prompt": "b", "seed": 2, "height": 3},
    ]
    with pytest.raises(UsageError, match="seed: has 1 entry for 2 prompts"):
        one_by_one({**given, "seed": [1]})
