"""Inputs of inference given as text become the values that units read; what is no such
value is refused by name.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import GenerateConfig, UsageError
from dstrain.config import NamedInput, parse_input
from dstrain.generation.inputs import input_names, naming_flags, parse_arguments
from dstrain.plugin import Column, Constant, EntryCount, InferenceOnly
from PIL import Image

from tests.support.family import build

WIRING = replace(
    build("base"),
    inputs={
        **build("base").inputs,
        "edit_image": Column("edit_image", "image", multiple=16),
        "mask": Column("mask", "image", mode="L", of="edit_image"),
        "references": Column("references", "images", entries=EntryCount("places")),
        "places": Column("places", "texts"),
        "first": Column(
            "video",
            "image",
            frame="first",
            multiple=16,
            frame_multiple=4,
            fps=16.0,
            optional=True,
        ),
        "strength": InferenceOnly("number"),
        "area": Constant(1024),
    },
)


def given(*texts: str, **flags: Any) -> dict[str, Any]:
    config = GenerateConfig(
        model="tiny",
        toy=True,
        output=Path("x.png"),
        input=tuple(map(parse_input, texts)),
        **{"prompt": "dog", **flags},
    )
    assert set(input_names(config)) >= {"prompt"}
    return parse_arguments(config, WIRING)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("height", "--height"),
        ("guidance_scale", "--guidance_scale"),
        ("mask", "--input mask"),
        ("metadata.csv:2", "metadata.csv:2"),
    ],
)
def test_an_error_of_an_argument_names_its_flag(where: str, named: str) -> None:
    config = GenerateConfig(
        model="tiny",
        output=Path("x.png"),
        height=16,
        input=(NamedInput("mask", "m.png"),),
    )
    with pytest.raises(UsageError) as caught, naming_flags(config):
        raise UsageError(where, "is wrong")
    assert str(caught.value) == f"dstrain: error: {named}: is wrong"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (21, 37, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a b.png")
    return tmp_path / "a b.png"


def test_flags_and_named_inputs_are_given_together() -> None:
    values = given("strength=0.5", "area=64", height=16, width=32)
    assert values == {
        "prompt": "dog",
        "height": 16,
        "width": 32,
        "strength": 0.5,
        "area": 64,
        "seed": 0,
    }
    assert isinstance(values["area"], int)


@pytest.mark.parametrize("name", ["edit_image", "edit-image", "first"])
def test_an_image_is_read_as_it_is_from_a_relative_or_absolute_path(
    name: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(image.parent)
    for text in (str(image), "a b.png"):
        value = given(f"{name}={text}", height=16, width=16)[name.replace("-", "_")]
        assert np.array_equal(np.asarray(value), np.asarray(Image.open(image)))


def test_a_list_is_the_input_repeated_and_one_is_a_list_too(image: Path) -> None:
    assert [
        len(given(*[f"references={image}"] * count)["references"]) for count in (1, 3)
    ] == [1, 3]


def test_a_mask_is_as_large_as_its_image(image: Path) -> None:
    Image.new("L", (74, 42), 255).save(image.parent / "mask.png")
    Image.new("L", (37, 37), 255).save(image.parent / "square.png")
    values = given(f"edit_image={image}", f"mask={image.parent / 'mask.png'}")
    assert values["mask"].size == values["edit_image"].size == (37, 21)
    with pytest.raises(UsageError, match="expected that size or its aspect ratio"):
        given(f"edit_image={image}", f"mask={image.parent / 'square.png'}")
    # In whichever order they are given; and alone, as it is.
    texts = [f"mask={image.parent / 'mask.png'}", f"edit_image={image}"]
    assert given(*texts)["mask"].size == (37, 21)
    assert given(texts[0])["mask"].size == (74, 42)


def test_lists_that_do_not_fit_together_are_refused(image: Path) -> None:
    texts = [f"references={image}"] * 2
    assert given(*texts, "places=a", "places=b")["places"] == ["a", "b"]
    with pytest.raises(
        UsageError, match=r"references: has 2 entries, and places has 1"
    ):
        given(*texts, "places=a")


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        given("strength=strong", "area=1.5")
    assert refused.value.what == "2 bad values"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("strenth=1",), "has no input 'strenth'; did you mean 'strength'"),
        (("strength=strong",), "strength: 'strong' is not a finite number"),
        (("area=1.5",), "area: '1.5' is not an integer"),
        (
            ("strength=1", "strength=2"),
            "strength: is a list, but one number is expected",
        ),
        (("edit_image=nothing.png",), "edit_image: no such file"),
        (("prompt=cat",), "prompt is also given as --prompt"),
        (("strength= ",), "--input: strength is blank"),
        (("area=",), "--input: area is blank"),
        (("edit_image=",), "--input: edit_image is blank"),
        (("references=",), "--input: references is blank"),
    ],
)
def test_what_is_no_such_value_is_refused_by_name(
    texts: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        given(*texts)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "value"), [("num_frames", 5), ("negative_prompt", "blurry")]
)
def test_the_flag_of_an_input_that_the_variant_does_not_have_is_refused(
    flag: str, value: Any
) -> None:
    inputs = {
        name: source
        for name, source in WIRING.inputs.items()
        if name != "negative_prompt"
    }
    spec = replace(WIRING, inputs=inputs, cfg_inputs={}, defaults={})
    wanted = GenerateConfig(
        model="tiny", toy=True, output=Path("x.png"), prompt="dog", **{flag: value}
    )
    with pytest.raises(
        UsageError, match=f"--{flag}: has no effect: variant base has no input"
    ):
        parse_arguments(wanted, spec)


@pytest.mark.parametrize("text", ["edit_image", "=x.png", ""])
def test_an_input_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected NAME=VALUE"):
        parse_input(text)


def test_a_value_may_contain_the_sign_and_be_empty() -> None:
    assert parse_input("a=b=c") == NamedInput("a", "b=c")
    assert parse_input("a=") == NamedInput("a", "")
