"""Images are loaded upright, in the mode wanted, at the size that their header states."""

import io
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import (
    Buckets,
    Resolution,
    fit,
    images,
    load_image,
    read_size,
    white_pixels,
)
from dstrain.data.images import read_header
from dstrain.data.variants.views import View
from PIL import ExifTags, Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile

DYNAMIC = Resolution(None, None, 1024 * 1024)
QUARTERS = np.array(
    [
        [[200, 30, 40], [20, 180, 60]],
        [[10, 50, 220], [240, 230, 20]],
        [[90, 90, 90], [0, 0, 0]],
    ],
    np.uint8,
)
UPRIGHT = QUARTERS.repeat(16, 0).repeat(16, 1)
"""(48, 32, 3): three rows and two columns of plain colours, all different."""

STORED = {1: UPRIGHT, 2: UPRIGHT[:, ::-1], 3: UPRIGHT[::-1, ::-1], 4: UPRIGHT[::-1]}
STORED |= {
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT, 1),
    7: UPRIGHT[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(UPRIGHT, -1),
}
"""EXIF orientation -> how the camera stores the upright image."""


def error(image: Image.Image, wanted: np.ndarray) -> int:
    got = np.asarray(image).astype(int)
    assert got.shape == wanted.shape
    return int(np.abs(got - wanted.astype(int)).max())


def grey(values: np.ndarray) -> np.ndarray:
    return values @ np.array([0.299, 0.587, 0.114])


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation_is_applied_to_pixels_and_size(
    tmp_path: Path, suffix: str, orientation: int
) -> None:
    path = tmp_path / f"a.{suffix}"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {
        "jpg": {"quality": 100, "subsampling": 0},
        "webp": {"lossless": True},
    }.get(suffix, {})
    Image.fromarray(np.ascontiguousarray(STORED[orientation])).save(
        path, exif=exif, **options
    )
    assert read_size(path) == (48, 32)
    assert error(load_image(path, "RGB", None), UPRIGHT) <= (
        2 if suffix == "jpg" else 0
    )


def test_reading_a_size_decodes_no_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile,
        "load",
        lambda image: decoded.append(image.format) or load(image),
    )
    for suffix in ("png", "jpg"):
        content = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (256, 320, 3), dtype=np.uint8)
        Image.fromarray(noise).save(content, suffix.replace("jpg", "jpeg"))
        path = tmp_path / f"torn.{suffix}"
        path.write_bytes(content.getvalue()[:2000])
        with pytest.raises(
            UsageError,
            match=rf"torn\.{suffix}: is truncated or damaged: it does not end like a",
        ):
            read_size(path)
        path.write_bytes(content.getvalue()[:2000] + content.getvalue()[3000:])
        assert read_size(path) == (256, 320) and not decoded


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
    first = np.asarray(palette) == 0
    grey_alpha = Image.merge(
        "LA", (Image.fromarray(lightness), Image.fromarray(half[..., 0]))
    )
    lightness3 = np.stack([lightness] * 3, 2)
    one = Image.fromarray(lightness > 100)
    return {
        "RGB.png": (Image.fromarray(UPRIGHT), UPRIGHT),
        "RGBA.png": (rgba, over_white),
        "RGBA.webp": (rgba, over_white),
        "L.png": (Image.fromarray(lightness), lightness3),
        "LA.png": (grey_alpha, (lightness3 * (128 / 255) + 127).round()),
        "P.png": (palette, np.asarray(palette.convert("RGB"))),
        "P-clear.png": (
            clear,
            np.where(first[..., None], 255, np.asarray(palette.convert("RGB"))),
        ),
        "P.gif": (palette, np.asarray(palette.convert("RGB"))),
        "1.png": (one, np.stack([(lightness > 100) * 255] * 3, 2)),
        "I16.png": (Image.fromarray(ramp), ramp8),
        "I16.tiff": (Image.fromarray(ramp), ramp8),
        "I.tiff": (Image.fromarray(ramp.astype(np.int32)), ramp8),
        "F.tiff": (Image.fromarray(ramp.astype(np.float32) / 65535), ramp8),
        "CMYK.tiff": (Image.fromarray(UPRIGHT).convert("CMYK"), UPRIGHT),
    }


@pytest.mark.parametrize("name", modes())
def test_golden_images_of_every_mode_are_right_to_one_level(
    tmp_path: Path, name: str
) -> None:
    image, wanted = modes()[name]
    path = tmp_path / name
    image.save(path, **({"lossless": True} if name.endswith("webp") else {}))
    assert error(load_image(path, "RGB", None), wanted) <= 1
    luminance = grey(wanted.astype(float)).round()
    assert error(load_image(path, "L", None), luminance) <= 1


def test_cmyk_photographs_keep_their_colours(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(UPRIGHT).convert("CMYK").save(path, quality=100, subsampling=0)
    assert error(load_image(path, "RGB", None), UPRIGHT) <= 4


def photograph(height: int, width: int) -> Image.Image:
    """A smooth image with edges, as photographs are."""
    y, x = np.mgrid[0:height, 0:width]
    squares = 30 * ((x // 64 + y // 48) % 2)
    waves = [
        110 + 90 * np.sin(x / (19 + 7 * c)) * np.cos(y / (23 + 5 * c)) + squares
        for c in range(3)
    ]
    return Image.fromarray(np.stack(waves, 2).astype(np.uint8))


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("scale", [4, 8, 16])
def test_a_large_photograph_is_decoded_small_and_looks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: int, orientation: int
) -> None:
    path = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    photograph(768, 1024).save(path, quality=95, exif=exif)
    wanted = (
        (768 // scale, 1024 // scale)
        if orientation == 1
        else (1024 // scale, 768 // scale)
    )
    decoded: list[tuple[int, int]] = []
    convert = images.convert
    monkeypatch.setattr(
        images,
        "convert",
        lambda image, mode: decoded.append(image.size) or convert(image, mode),
    )
    small = load_image(path, "RGB", wanted)
    monkeypatch.setattr(JpegImageFile, "draft", lambda *_: None)
    whole = load_image(path, "RGB", wanted)
    part = scale // 2
    assert decoded == [
        (1024 // part, 768 // part),
        (1024, 768),
    ]  # at least twice the size asked for
    difference = np.abs(np.asarray(small).astype(float) - np.asarray(whole)).mean()
    assert small.size == whole.size == wanted[::-1] and difference < 1


@pytest.mark.parametrize("size", [None, (768, 1024), (385, 513), (200, 600)])
def test_a_photograph_is_decoded_whole_where_less_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int] | None
) -> None:
    photograph(768, 1024).save(tmp_path / "a.jpg")
    decoded: list[tuple[int, int]] = []
    convert = images.convert
    monkeypatch.setattr(
        images,
        "convert",
        lambda image, mode: decoded.append(image.size) or convert(image, mode),
    )
    load_image(tmp_path / "a.jpg", "RGB", size)
    assert decoded == [(1024, 768)]


@pytest.mark.parametrize(
    "values",
    [[-0.1, 0.5], [0.5, 1.1], [0.5, float("nan")], [0.5, float("inf")], [0.0, 255.0]],
)
def test_floats_that_are_not_from_0_to_1_are_refused(
    tmp_path: Path, values: list[float]
) -> None:
    Image.fromarray(np.array([values] * 4, np.float32)).save(tmp_path / "a.tiff")
    assert read_size(tmp_path / "a.tiff") == (4, 2)
    with pytest.raises(
        UsageError,
        match=r"a\.tiff: cannot be read: float values outside 0 .black. to 1 .white.",
    ):
        load_image(tmp_path / "a.tiff", "RGB", None)


def test_rgba_keeps_transparency_and_opaque_images_become_opaque(
    tmp_path: Path,
) -> None:
    for name in (
        "RGBA.png",
        "P-clear.png",
        "LA.png",
        "RGB.png",
        "I16.png",
        "CMYK.tiff",
    ):
        image, _ = modes()[name]
        image.save(tmp_path / name)
        alpha = np.asarray(load_image(tmp_path / name, "RGBA", None))[..., 3]
        wanted = {"P-clear.png": {0, 255}, "RGBA.png": {128}, "LA.png": {128}}.get(
            name, {255}
        )
        assert set(np.unique(alpha).tolist()) == wanted


def test_colour_modes_without_a_plain_meaning_are_refused_from_the_header(
    tmp_path: Path,
) -> None:
    Image.fromarray(UPRIGHT).convert("LAB").save(tmp_path / "a.tiff")
    with pytest.raises(UsageError, match="cannot be read: colour mode LAB"):
        read_size(tmp_path / "a.tiff")


def test_16_bit_grey_is_scaled_and_rounded(tmp_path: Path) -> None:
    Image.fromarray(
        np.array([[0, 128, 129, 200, 257, 32896, 65406, 65407, 65535]], np.uint16)
    ).save(tmp_path / "a.png")
    assert np.asarray(load_image(tmp_path / "a.png", "L", None)).tolist() == [
        [0, 0, 1, 1, 1, 128, 254, 255, 255]
    ]


def test_grey_beyond_16_bits_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 70_000, np.int32)).save(tmp_path / "a.tiff")
    with pytest.raises(
        UsageError, match=r"a\.tiff: cannot be read: grey values beyond 16 bits"
    ):
        load_image(tmp_path / "a.tiff", "RGB", None)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_what_is_no_image_is_refused_and_programs_are_not_run(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(
        UsageError, match=r"a\.png: is not an image in a supported format"
    ):
        read_size(tmp_path / "a.png")


def test_damaged_exif_data_is_no_reason_to_refuse(tmp_path: Path) -> None:
    Image.fromarray(UPRIGHT).save(tmp_path / "a.png", exif=b"Exif\x00\x00garbage!")
    assert read_size(tmp_path / "a.png") == (48, 32)
    assert error(load_image(tmp_path / "a.png", "RGB", None), UPRIGHT) == 0


@pytest.mark.parametrize(
    "size", [(48, 32), (24, 16), (96, 64), (16, 32), (48, 16), (64, 128)]
)
def test_an_image_is_loaded_at_exactly_the_size_asked(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    Image.fromarray(UPRIGHT).save(tmp_path / "a.png")
    image = load_image(tmp_path / "a.png", "RGB", size)
    assert (image.height, image.width) == size


def test_scaling_covers_and_the_crop_is_about_the_centre(tmp_path: Path) -> None:
    stripes = np.zeros((20, 60, 3), np.uint8)
    stripes[:, 20:40] = 255
    Image.fromarray(stripes).save(tmp_path / "a.png")
    assert (
        error(
            load_image(tmp_path / "a.png", "RGB", (20, 20)), np.full((20, 20, 3), 255)
        )
        == 0
    )
    doubled = np.asarray(load_image(tmp_path / "a.png", "RGB", (40, 80)))
    assert (
        doubled[:, :14].max() == 0
        and doubled[:, 26:54].min() == 255
        and doubled[:, 66:].max() == 0
    )


@pytest.mark.parametrize(
    "size, wanted",
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


def test_without_a_multiple_the_size_stays() -> None:
    assert (
        fit((3001, 17), DYNAMIC, 0)
        == fit((3001, 17), Resolution(64, 64, 1), 0)
        == (3001, 17)
    )


def test_a_fixed_size_is_taken_by_every_image() -> None:
    assert fit((3, 9999), Resolution(64, 96, 1), 16) == (64, 96)


def test_a_fixed_size_off_the_multiples_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match="--width: 100 is not a multiple of 16; the nearest is 96"
    ):
        Resolution(64, 100, 1).check(16)


@pytest.mark.parametrize("action", ["error", "ignore"])
@pytest.mark.parametrize("side", [2**14 + 1, 2**15])
def test_an_image_of_too_many_pixels_is_refused_even_if_warnings_are_ignored(
    action: Literal["error", "ignore"], side: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.pgm"
    path.write_bytes(b"P5 %d %d 255\n" % (side, side))
    with (
        warnings.catch_warnings(),
        pytest.raises(UsageError, match="has too many pixels: the limit is"),
    ):
        warnings.simplefilter(action)
        read_size(path)


def test_warnings_of_the_process_are_left_as_they_are() -> None:
    code = "import warnings, PIL.Image, numpy; before = list(warnings.filters); import dstrain.data.images\n"
    subprocess.run(
        [sys.executable, "-c", code + "assert warnings.filters == before"], check=True
    )


@pytest.mark.parametrize("size", [(15, 64), (64, 15), (40_000_000, 16)])
def test_an_image_that_leaves_nothing_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match="is too small for sides that are multiples of 16"
    ):
        fit(size, DYNAMIC, 16)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_an_image_is_its_pixels_alone(mode: str, suffix: str, tmp_path: Path) -> None:
    """So a unit finds the same in an image of the feature cache."""
    path = tmp_path / f"image{suffix}"
    Image.new("RGB", (8, 8)).save(path, dpi=(72, 72))
    assert load_image(path, mode, None).info == {}


def test_a_view_says_where_an_image_is_cropped_and_whether_it_is_mirrored(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ramp.png"
    ramp = np.repeat(np.arange(64, dtype=np.uint8)[np.newaxis], 16, axis=0)
    Image.fromarray(ramp).save(path)
    for crop, first in ((0.0, 0), (0.5, 24), (1.0, 48)):
        found = np.asarray(load_image(path, "L", (16, 16), view=View(False, crop)))
        assert np.array_equal(found, ramp[:, first : first + 16])
        mirrored = np.asarray(load_image(path, "L", (16, 16), view=View(True, crop)))
        assert np.array_equal(mirrored, found[:, ::-1])
    whole = load_image(path, "L", None, view=View(True))
    assert np.array_equal(np.asarray(whole), ramp[:, ::-1])


def test_an_image_takes_the_size_of_its_bucket() -> None:
    resolution = Resolution(None, None, 1, Buckets(64))
    assert fit((100, 200), resolution, 16) == (48, 80)
    assert fit((100, 200), resolution, 0) == (100, 200)


@pytest.mark.parametrize(
    ("mode", "options", "has_alpha"),
    [
        ("RGB", {}, False),
        ("L", {}, False),
        ("RGBA", {}, True),
        ("LA", {}, True),
        ("P", {}, False),
        ("P", {"transparency": 0}, True),
    ],
)
def test_a_header_tells_whether_parts_may_be_transparent(
    tmp_path: Path, mode: str, options: dict[str, Any], has_alpha: bool
) -> None:
    Image.new(mode, (4, 2)).save(tmp_path / "a.png", **options)
    assert read_header(tmp_path / "a.png") == ((2, 4), has_alpha)


def test_max_pixels_that_leave_no_side_are_named() -> None:
    with pytest.raises(ValueError, match="within --max_pixels 100: raise that"):
        fit((64, 64), replace(DYNAMIC, max_pixels=100), 16)


def test_of_the_pixels_of_a_mask_that_become_one_a_single_one_tells() -> None:
    pixels = np.zeros((16, 24), np.uint8)
    pixels[4, 4], pixels[12, 20], pixels[0, 0] = 128, 127, 255
    mask = Image.fromarray(pixels)
    assert white_pixels(mask, (2, 3)).tolist() == [[True, False, False], [False] * 3]
    assert white_pixels(mask, (16, 24)).sum() == 2
    # In another colour mode, too.
    assert white_pixels(Image.new("RGBA", (4, 4), "white"), (2, 2)).all()
