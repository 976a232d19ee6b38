"""Images are loaded upright, in the mode wanted, at the size that their header states."""

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data.buckets import Buckets
from dstrain.data.images import (
    Resolution,
    cover,
    fit,
    load_image,
    read_size,
    white_pixels,
)
from PIL import ExifTags, Image

from tests.support.bad_files import encoded
from tests.support.noise_images import noise_image

DYNAMIC = Resolution(None, None, 1024 * 1024)
COLOURS = [[0xC81E28, 0x14B43C], [0x0A32DC, 0xF0E614], [0x5A5A5A, 0]]
QUARTERS = np.array(
    [[[c >> 16, c >> 8 & 255, c & 255] for c in row] for row in COLOURS], np.uint8
)
UPRIGHT = QUARTERS.repeat(16, 0).repeat(16, 1)
"""(48, 32, 3): three rows and two columns of plain colours, all different."""
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT, 1),
    7: UPRIGHT[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(UPRIGHT, -1),
}
"""EXIF orientation -> how the camera stores the upright image."""


def rotated(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def error(image: Image.Image, wanted: np.ndarray) -> int:
    """The greatest difference of a pixel."""
    got = np.asarray(image).astype(int)
    assert got.shape == wanted.shape
    return int(np.abs(got - wanted.astype(int)).max())


@pytest.mark.parametrize(
    ("suffix", "options", "most"),
    [
        ("png", {}, 0),
        ("jpg", {"quality": 100, "subsampling": 0}, 2),
        ("webp", {"lossless": True}, 0),
        ("tiff", {}, 0),
    ],
)
@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation_is_applied_to_pixels_and_size(
    tmp_path: Path, suffix: str, options: dict[str, Any], most: int, orientation: int
) -> None:
    path = tmp_path / f"a.{suffix}"
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    image.save(path, exif=rotated(orientation), **options)
    assert read_size(path) == (48, 32)
    assert error(load_image(path, "RGB", None), UPRIGHT) <= most


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_reading_a_size_decodes_no_pixels(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 320, 3), dtype=np.uint8)
    content = encoded(kind, Image.fromarray(noise))
    path = tmp_path / f"torn.{kind}"
    path.write_bytes(content[:2000])
    assert read_size(path) == (256, 320)
    with pytest.raises(UsageError):
        load_image(path, "RGB", None)


def modes() -> dict[str, tuple[Image.Image, np.ndarray]]:
    """Name -> an image to be saved losslessly and its pixels in RGB."""
    half = np.full((*UPRIGHT.shape[:2], 1), 128, np.uint8)
    over_white = (UPRIGHT * (128 / 255) + 255 * (127 / 255)).round()
    rgba = Image.fromarray(np.concatenate([UPRIGHT, half], 2))
    lightness = np.asarray(Image.fromarray(UPRIGHT).convert("L"))
    ramp = np.arange(0, 65536, 32, dtype=np.uint16).reshape(64, 32)
    ramp8 = np.stack([ramp / 257] * 3, 2)
    palette = Image.fromarray(UPRIGHT).quantize(16)
    clear = palette.copy()
    clear.info["transparency"] = bytes([0] + [255] * 15)
    coloured = np.asarray(palette.convert("RGB"))
    first = np.asarray(palette)[..., None] == 0
    clear_16 = Image.fromarray(ramp)
    clear_16.info["transparency"] = 32000
    bands = (Image.fromarray(lightness), Image.fromarray(half[..., 0]))
    grey = np.stack([lightness] * 3, 2)
    return {
        "RGB.png": (Image.fromarray(UPRIGHT), UPRIGHT),
        "RGBA.png": (rgba, over_white),
        "RGBA.webp": (rgba, over_white),
        "L.png": (bands[0], grey),
        "LA.png": (Image.merge("LA", bands), (grey * (128 / 255) + 127).round()),
        "P.png": (palette, coloured),
        "P-clear.png": (clear, np.where(first, 255, coloured)),
        "P.gif": (palette, coloured),
        "1.png": (Image.fromarray(lightness > 100), (grey > 100) * 255),
        "I16.png": (Image.fromarray(ramp), ramp8),
        "I16-clear.png": (clear_16, np.where(ramp[..., None] == 32000, 255, ramp8)),
        "I16.tiff": (Image.fromarray(ramp), ramp8),
        "I.tiff": (Image.fromarray(ramp.astype(np.int32)), ramp8),
        "F.tiff": (Image.fromarray(ramp.astype(np.float32) / 65535), ramp8),
        "CMYK.tiff": (Image.fromarray(UPRIGHT).convert("CMYK"), UPRIGHT),
    }


@pytest.mark.parametrize("name", modes())
def test_images_of_every_mode_are_right_to_one_level(tmp_path: Path, name: str) -> None:
    image, wanted = modes()[name]
    path = tmp_path / name
    image.save(path, **({"lossless": True} if name.endswith("webp") else {}))
    assert error(load_image(path, "RGB", None), wanted) <= 1
    luminance = (wanted.astype(float) @ [0.299, 0.587, 0.114]).round()
    assert error(load_image(path, "L", None), luminance) <= 1
    # Transparency is kept, and opaque images become opaque.
    alphas = {"P-clear": {0, 255}, "I16-clear": {0, 255}, "RGBA": {128}, "LA": {128}}
    alpha = np.asarray(load_image(path, "RGBA", None))[..., 3]
    assert {*alpha.flat} == alphas.get(path.stem, {255})


def test_cmyk_photographs_keep_their_colours(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(UPRIGHT).convert("CMYK").save(path, quality=100, subsampling=0)
    assert error(load_image(path, "RGB", None), UPRIGHT) <= 4


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """A smooth image with edges, as photographs are; 768 x 1024 (height x width)."""
    y, x = np.mgrid[0:768, 0:1024]
    squares = 30 * ((x // 64 + y // 48) % 2)
    waves = [
        110 + 90 * np.sin(x / (19 + 7 * c)) * np.cos(y / (23 + 5 * c)) + squares
        for c in range(3)
    ]
    return Image.fromarray(np.stack(waves, 2).astype(np.uint8))


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    ("size", "is_small"),
    [
        *(((192, 256), True), ((96, 128), True), ((48, 64), True)),
        # Where less would be seen, it is decoded whole.
        *(((768, 1024), False), ((385, 513), False), ((200, 600), False)),
    ],
)
def test_a_large_photograph_is_decoded_small_and_looks_the_same(
    tmp_path: Path,
    photograph: Image.Image,
    size: tuple[int, int],
    is_small: bool,
    orientation: int,
) -> None:
    path = tmp_path / "a.jpg"
    photograph.save(path, quality=95, exif=rotated(orientation))
    size = size if orientation == 1 else size[::-1]
    found = np.asarray(load_image(path, "RGB", size)).astype(float)
    whole = np.asarray(cover(load_image(path, "RGB", None), size))
    gap = np.abs(found - whole).mean()
    assert (0 < gap < 1) if is_small else gap == 0


@pytest.mark.parametrize(
    "pixels",
    [
        *([-0.1, 0.5], [0.5, 1.1], [0.5, float("nan")], [0.5, float("inf")]),
        *([0.0, 255.0], [70_000, 70_000], [-1, 0], [0, 255]),
    ],
)
def test_grey_out_of_range_is_refused(tmp_path: Path, pixels: list[float]) -> None:
    dtype = np.float32 if isinstance(pixels[0], float) else np.int32
    Image.fromarray(np.array([pixels] * 4, dtype)).save(tmp_path / "a.tiff")
    assert read_size(tmp_path / "a.tiff") == (4, 2)
    with pytest.raises(UsageError) as caught:
        load_image(tmp_path / "a.tiff", "RGB", None)
    assert caught.value.where == str(tmp_path / "a.tiff")


def test_16_bit_grey_is_scaled_and_rounded(tmp_path: Path) -> None:
    values = [[0, 128, 129, 200, 257, 32896, 65406, 65407, 65535]]
    Image.fromarray(np.array(values, np.uint16)).save(tmp_path / "a.png")
    found = np.asarray(load_image(tmp_path / "a.png", "L", None))
    assert found.tolist() == [[0, 0, 1, 1, 1, 128, 254, 255, 255]]


def test_damaged_exif_data_is_no_reason_to_refuse(tmp_path: Path) -> None:
    Image.fromarray(UPRIGHT).save(tmp_path / "a.png", exif=b"Exif\x00\x00garbage!")
    assert read_size(tmp_path / "a.png") == (48, 32)
    assert error(load_image(tmp_path / "a.png", "RGB", None), UPRIGHT) == 0


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((512, 512), (512, 512)),
        ((1024, 1024), (1024, 1024)),
        ((2048, 2048), (1024, 1024)),
        ((1112, 1112), (1024, 1024)),
        ((4096, 1024), (2048, 512)),
        ((1000, 750), (992, 736)),
        ((31, 33), (16, 32)),
        ((4000, 3000), (1168, 880)),
    ],
)
def test_dynamic_sizes_shrink_to_max_pixels_and_never_grow(
    size: tuple[int, int], wanted: tuple[int, int]
) -> None:
    assert fit(size, DYNAMIC, 16) == wanted
    assert fit(size[::-1], DYNAMIC, 16) == wanted[::-1]


def test_a_size_is_that_of_the_image_else_a_fixed_one_or_a_bucket() -> None:
    fixed, bucket = Resolution(64, 96, 1), Resolution(None, None, 1, Buckets(64))
    for resolution in (DYNAMIC, fixed, bucket):
        assert fit((3001, 17), resolution, 0) == (3001, 17)
    assert fit((3, 9999), fixed, 16) == (64, 96)
    assert fit((100, 200), bucket, 16) == (48, 80)
    for width, nearest in ((100, 96), (7, 16)):
        with pytest.raises(UsageError, match=rf"{width} .* 16.* {nearest}$") as caught:
            Resolution(64, width, 1).check(16)
        assert caught.value.where == "--width"


@pytest.mark.parametrize(
    ("size", "most", "named"),
    [
        *(((15, 64), 2**20, "15 x 64"), ((64, 15), 2**20, "64 x 15")),
        ((40_000_000, 16), 2**20, "40000000 x 16"),
        ((64, 64), 100, "--max_pixels 100"),
    ],
)
def test_an_image_that_leaves_nothing_is_refused(
    size: tuple[int, int], most: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        fit(size, Resolution(None, None, most), 16)
    # More pixels help only where the image has enough.
    assert ("--max_pixels" in str(caught.value)) is (min(size) >= 16)


@pytest.mark.parametrize("action", ["error", "ignore"])
@pytest.mark.parametrize("side", [2**14 + 1, 2**15])
def test_an_image_of_too_many_pixels_is_refused_even_if_warnings_are_ignored(
    action: Literal["error", "ignore"], side: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.pgm"
    path.write_bytes(b"P5 %d %d 255\n" % (side, side))
    with warnings.catch_warnings(), pytest.raises(UsageError, match="268,435,456"):
        warnings.simplefilter(action)
        read_size(path)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_an_image_is_its_pixels_alone(mode: str, suffix: str, tmp_path: Path) -> None:
    """So a unit finds the same in an image of the feature cache."""
    path = tmp_path / f"image{suffix}"
    Image.new("RGB", (8, 8)).save(path, dpi=(72, 72))
    assert load_image(path, mode, None).info == {}


def test_of_the_pixels_of_a_mask_that_become_one_a_single_one_tells() -> None:
    pixels = np.zeros((16, 24), np.uint8)
    pixels[4, 4], pixels[12, 20], pixels[0, 0] = 128, 127, 255
    mask = Image.fromarray(pixels)
    assert white_pixels(mask, (2, 3)).tolist() == [[True, False, False], [False] * 3]
    assert white_pixels(mask, (16, 24)).sum() == 2
    # In another colour mode, too.
    assert white_pixels(Image.new("RGBA", (4, 4), "white"), (2, 2)).all()


def test_every_checksum_of_a_png_is_compared(tmp_path: Path) -> None:
    content, path = encoded("PNG", noise_image(168, 120)), tmp_path / "a"
    path.write_bytes(content + b"more")
    load_image(path, "RGB", None)
    for place in range(40, len(content) - 12, len(content) // 50):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UsageError):
            load_image(path, "RGB", None)
