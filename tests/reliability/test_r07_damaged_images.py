"""R7: damage inside an image is refused, and so is a file that changes under a run."""

import io
import random
import warnings
from collections.abc import Callable
from functools import cache
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import StateError, UsageError
from dstrain.data import Cell, Resolution, load_cell, read_size
from dstrain.data.cells import image_cell
from dstrain.data.images import ImageInfo
from dstrain.plugin import Column
from dstrain.storage import file_mark
from PIL import Image

pytestmark = pytest.mark.promise(
    "R7", "damage inside an image: refused as the page on datasets says"
)

Damage = Callable[[bytearray, random.Random], None]
SIZES = ((160, 112), (128, 96), (200, 160))
"""(width, height) of the images that are damaged."""
FILES = 420
"""Damaged files of a format."""
PAGE = Path(__file__).parents[2] / "docs/guide/datasets.md"
WORDS = {"all": (1.0, 1.0), "most": (0.5, 1.0), "few": (0.0, 0.5), "none": (0.0, 0.0)}
"""A word of the page -> the least and the greatest share of files that are refused."""
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "PNG": ("PNG", {}),
    "JPEG": ("JPEG", {"quality": 95, "subsampling": 0}),
    "JPEG, progressive": ("JPEG", {"quality": 95, "progressive": True}),
    "WebP": ("WEBP", {"quality": 90}),
    "WebP, lossless": ("WEBP", {"lossless": True}),
    "AVIF": ("AVIF", {"quality": 90}),
    "GIF": ("GIF", {}),
    "TIFF, deflate": ("TIFF", {"compression": "tiff_adobe_deflate"}),
    "TIFF, LZW": ("TIFF", {"compression": "tiff_lzw"}),
    "TIFF": ("TIFF", {}),
    "BMP": ("BMP", {}),
    "PPM": ("PPM", {}),
}


def truncated(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data) // 20, len(data)) :]


def half_zero(data: bytearray, draw: random.Random) -> None:
    half = len(data) // 2
    data[half:] = bytes(len(data) - half)


def half_zero_but_its_end(data: bytearray, draw: random.Random) -> None:
    half = len(data) // 2
    data[half:-16] = bytes(len(data) - half - 16)


def block_zero(data: bytearray, draw: random.Random) -> None:
    length = len(data) // 20
    at = draw.randrange(len(data) // 10, len(data) - length)
    data[at : at + length] = bytes(length)


def blocks_swapped(data: bytearray, draw: random.Random) -> None:
    length = len(data) // 20
    first = draw.randrange(len(data) // 10, len(data) // 2)
    second = draw.randrange(first + length, len(data) - length)
    one, other = slice(first, first + length), slice(second, second + length)
    data[one], data[other] = data[other], data[one]


def bytes_changed(data: bytearray, draw: random.Random) -> None:
    for _ in range(8):
        data[draw.randrange(len(data) // 10, len(data))] ^= draw.randrange(1, 256)


def bit_flipped(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data) // 10, len(data))] ^= 1 << draw.randrange(8)


DAMAGES: dict[str, Damage] = {
    "truncated": truncated,
    "second half zero": half_zero,
    "the same but its end": half_zero_but_its_end,
    "a block of zeros": block_zero,
    "two blocks swapped": blocks_swapped,
    "8 bytes changed": bytes_changed,
    "1 bit flipped": bit_flipped,
}


@cache
def picture(size: tuple[int, int]) -> Image.Image:
    """Large shapes and fine grain, as in a photograph."""
    draw = np.random.default_rng(size[0])
    coarse = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    shapes = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=int)
    grain = draw.normal(0, 6, shapes.shape)
    return Image.fromarray((shapes + grain).clip(0, 255).astype(np.uint8))


def encoded(form: str, size: tuple[int, int]) -> bytes:
    name, options = FORMATS[form]
    content = io.BytesIO()
    picture(size).save(content, name, **options)
    return content.getvalue()


def inspected(path: Path) -> Cell:
    info = ImageInfo(str(path), read_size(path), file_mark(path))
    return image_cell(Column("image", "image"), Resolution(None, None, 2**20), [info])


def load(path: Path) -> Any:
    """The pixels of a file, as a run inspects and loads it."""
    return np.asarray(load_cell(inspected(path)))


def refused(path: Path, whole: Any) -> bool:
    """Whether a damaged file is refused; it may be loaded with the pixels of the whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of tags that it leaves out
        try:
            return np.array_equal(load(path), whole)
        except UsageError as error:
            assert error.where == str(path)
            return True


def promised() -> dict[str, tuple[str, ...]]:
    """Format -> how much of each damage is refused, as the page on datasets says."""
    lines = PAGE.read_text("utf-8").splitlines()
    start = lines.index(f"| | {' | '.join(DAMAGES)} |") + 2
    rows = takewhile(lambda line: line.startswith("|"), lines[start:])
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: tuple(words) for name, *words in cells}


def test_the_page_tells_of_every_format() -> None:
    assert set(promised()) == set(FORMATS)


@pytest.mark.parametrize("form", FORMATS)
def test_damage_is_refused_as_the_page_says(
    form: str, tmp_path: Path, trials: Callable[[int], int]
) -> None:
    path = tmp_path / "image"
    whole = []
    for size in SIZES:
        path.write_bytes(encoded(form, size))
        whole.append((path.read_bytes(), load(path)))
    draw = random.Random(0)
    shares: dict[str, list[bool]] = {name: [] for name in DAMAGES}
    for number, name in zip(range(trials(FILES)), cycle(DAMAGES), strict=False):
        content, pixels = whole[number % len(whole)]
        data = bytearray(content)
        DAMAGES[name](data, draw)
        path.write_bytes(data)
        shares[name].append(refused(path, pixels))
    for name, word in zip(DAMAGES, promised()[form], strict=True):
        found = shares[name]
        share = sum(found) / len(found)
        # A few files say nothing of "most" and "few".
        least, most = (
            WORDS[word] if len(found) > 20 else (word == "all", word != "none")
        )
        assert least <= share <= most, (name, word, share)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_after_a_file_was_inspected_is_never_loaded(
    name: str, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "image"
    path.write_bytes(encoded(form, SIZES[0]))
    cell = inspected(path)
    data = bytearray(path.read_bytes())
    DAMAGES[name](data, random.Random(1))
    path.write_bytes(data)
    with (
        pytest.raises((UsageError, StateError), match=str(path)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        load_cell(cell)
