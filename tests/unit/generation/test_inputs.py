"""Inputs of inference given as text become values, or are refused by name."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import GenerateConfig, UsageError
from dstrain.config import parse_input
from dstrain.generation.inputs import parse_arguments
from dstrain.plugin import Column, Constant, EntryCount, InferenceOnly
from PIL import Image

from tests.support.family import build

FIRST = Column(
    "video",
    "image",
    frame="first",
    multiple=16,
    frame_multiple=4,
    fps=16.0,
    optional=True,
)
SPEC = replace(
    build("base"),
    inputs={
        **build("base").inputs,
        "edit_image": Column("edit_image", "image", multiple=16),
        "mask": Column("mask", "image", mode="L", of="edit_image"),
        "references": Column("references", "images", entries=EntryCount("places")),
        "places": Column("places", "texts"),
        "first": FIRST,
        "clip": Column("clip", "video"),
        "num_frames": InferenceOnly("integer"),
        "strength": InferenceOnly("number"),
        "area": Constant(1024),
    },
)


def given(*texts: str, **flags: Any) -> dict[str, Any]:
    inputs = tuple(map(parse_input, texts))
    config = GenerateConfig(
        model="tiny", output=Path("x.png"), prompt="dog", input=inputs, **flags
    )
    return parse_arguments(config, SPEC)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (21, 37, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a b.png")
    return tmp_path / "a b.png"


@pytest.mark.parametrize("name", ["edit_image", "edit-image", "first"])
def test_an_image_is_read_as_it_is_from_a_relative_or_absolute_path(
    name: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(image.parent)
    for text in (str(image), "a b.png"):
        value = given(f"{name}={text}", height=16, width=16)[name.replace("-", "_")]
        assert np.array_equal(np.asarray(value), np.asarray(Image.open(image)))


def test_a_video_is_read_in_as_many_frames_as_are_generated(image: Path) -> None:
    frames = image.parent / "frames"
    frames.mkdir()
    for number in range(3):
        shutil.copy(image, frames / f"{number}.png")
    clip = given(f"clip={frames}", num_frames=2)["clip"]
    assert clip.pixels.shape == (2, 21, 37, 3)


def test_a_mask_is_as_large_as_its_image(image: Path) -> None:
    for name, size in (("mask", (74, 42)), ("square", (37, 37))):
        Image.linear_gradient("L").resize(size).save(image.parent / f"{name}.png")
    texts = [f"edit_image={image}", f"mask={image.parent / 'mask.png'}"]
    for order in (texts, texts[::-1]):
        assert given(*order)["mask"].size == (37, 21)
    assert given(texts[1])["mask"].size == (74, 42)
    with pytest.raises(UsageError, match="mask"):
        given(texts[0], f"mask={image.parent / 'square.png'}")


def test_lists_that_do_not_fit_together_are_refused(image: Path) -> None:
    texts = [f"references={image}"] * 2
    assert given(*texts, "places=a", "places=")["places"] == ["a", ""]
    with pytest.raises(UsageError, match=r"references: .*2 .*places .*1"):
        given(*texts, "places=a")


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["strenth=1"], "--input strenth: .*'strength'"),
        (["strength=strong"], "--input:1:strength: 'strong'"),
        (["area=1.5"], r"area: '1\.5'"),
        (["strength=strong", "area=1.5"], r"(?s)strength: 'strong'.*area: '1\.5'"),
        (["strength=1", "strength=2"], "strength: "),
        (["edit_image=nothing.png"], r"edit_image: .*nothing\.png"),
        (["prompt=cat"], "--input: prompt .*--prompt"),
        (["strength= "], "--input: strength "),
        (["edit_image="], "--input: edit_image "),
        (["references="], "--input: references "),
        (["references=nothing.png", "references= "], "--input: references "),
    ],
)
def test_what_is_no_such_value_is_refused_by_name(texts: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        given(*texts)
