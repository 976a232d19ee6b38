"""Sizes are read as cards are named, and written for people."""

import pytest
from dstrain import UsageError
from dstrain.config import as_size
from dstrain.config.sizes import parse_frames, parse_resolutions, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("0.5GiB", 2**29),
        ("512MiB", 2**29),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size("--device_memory", text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-24GB", "24GBs", "24 KB", "1e9", "∞"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_size("--device_memory", text)
    assert error.value.where == "--device_memory"
    assert "expected a size such as 24GB, 24GiB or 24" in error.value.what


def test_sizes_are_written_in_the_unit_that_shows_them() -> None:
    sizes = {38.06 * 2**30: "38.06 GiB", 512 * 2**20: "0.50 GiB", 3174: "3.1 KiB"}
    assert {size: as_size(size) for size in sizes} == sizes
    assert as_size(50 * 2**20) == "50.0 MiB"


@pytest.mark.parametrize(
    ("text", "sides"),
    [(None, ()), ("1024", (1024,)), ("512, 768,1024", (512, 768, 1024))],
)
def test_resolutions_are_sides_in_pixels(
    text: str | None, sides: tuple[int, ...]
) -> None:
    assert parse_resolutions(text) == sides


@pytest.mark.parametrize(
    ("value", "frames"),
    [(81, (81,)), ("81", (81,)), ("17,33,49", (17, 33, 49)), ("49, 17", (17, 49))],
)
def test_numbers_of_frames_rise(value: int | str, frames: tuple[int, ...]) -> None:
    assert parse_frames(value) == frames


@pytest.mark.parametrize("value", [0, "17,", "17,0", "17,a", "17;33", "17,17"])
def test_what_is_no_number_of_frames_is_refused(value: int | str) -> None:
    with pytest.raises(UsageError, match="--num_frames"):
        parse_frames(value)


@pytest.mark.parametrize(
    "text", ["", "0", "-64", "64,", "512x512", "1e3", "٣", "64,64"]
)
def test_what_is_no_resolution_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--resolution"):
        parse_resolutions(text)
