"""Masks are cut as what they are of, and one that does not fit is a bad cell."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import Resolution, load_cell
from dstrain.data.cells import is_scaled
from dstrain.data.clips import FrameSampling
from dstrain.graph import Input, MaskColumn
from dstrain.plugin import Column
from PIL import Image

from tests.support.datasets import OWN_SIZES, bad_cells, open_rows, refusal

IMAGE: Mapping[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image", multiple=16),
}
ALLOWED = MaskColumn("mask", "image", mode="L", of="input_image")
MASKS: Mapping[str, Input] = {
    **IMAGE,
    "loss_mask": MaskColumn(
        "mask", "image", mode="L", of="input_image", not_empty=True
    ),
}
"""Masks for the loss, of which none may leave nothing."""
ALPHA: Mapping[str, Input] = {
    **IMAGE,
    "loss_mask": MaskColumn("image", "image", mode="RGBA", of="input_image"),
}
CONDITIONS: Mapping[str, Input] = {
    **IMAGE,
    "mask": Column("mask", "image", mode="L", multiple=16, of="input_image"),
    "regions": Column("regions", "images", mode="L", multiple=16, of="input_image"),
}
"""Masks that a variant reads."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with an image of 64 x 100 (height x width), wide.png."""
    Image.new("RGB", (100, 64), "red").save(tmp_path / "wide.png")
    return tmp_path


def write_mask(
    base: Path, name: str, size: tuple[int, int], level: int = 255, white: float = 0.5
) -> Image.Image:
    """Write a mask of a level whose right part is white."""
    mask = Image.new("L", size, level)
    mask.paste(255, (round(size[0] * white), 0, *size))
    mask.save(base / name)
    return mask


def test_a_mask_is_cut_as_the_image_that_it_is_of(base: Path) -> None:
    write_mask(base, "whole.png", (100, 64))
    write_mask(base, "half.png", (50, 32))
    lines = [f"wide.png,{name},a" for name in ("whole.png", "half.png", "")]
    table = "\n".join(["image,mask,prompt", *lines])
    for resolution in (OWN_SIZES, Resolution(32, 32, 2**20)):
        *rows, last = open_rows(base, table, MASKS, resolution=resolution).rows
        for row in rows:
            mask = load_cell(row["loss_mask"])
            assert row["loss_mask"].shapes == row["input_image"].shapes
            assert mask.size == load_cell(row["input_image"]).size
            assert mask.mode == "L"
        assert "loss_mask" not in last
    # Masks are loaded whatever the file keys.
    data = open_rows(base, table, MASKS, file_keys=("image",))
    assert set(data.columns) == {"prompt", "input_image", "loss_mask"}


def test_masks_that_do_not_fit_are_named_with_all_other_bad_cells(base: Path) -> None:
    write_mask(base, "tall.png", (64, 100))
    write_mask(base, "nearly.png", (33, 21))
    # A side may be rounded by as much as a pixel of the image.
    write_mask(base, "rounded.png", (50, 33))
    write_mask(base, "narrow.png", (98, 64))
    Image.new("RGBA", (100, 64), (0, 0, 0, 0)).save(base / "clear.png")
    (base / "broken.png").write_bytes((base / "tall.png").read_bytes()[:20])
    wide = {"image": "wide.png", "prompt": "a"}
    # Where what is masked is bad itself, sizes are not compared.
    none = {"image": "none.png", "mask": "tall.png"}
    rows = [
        {**wide, "mask": "tall.png", "regions": ["nearly.png", "clear.png"]},
        {**wide, "mask": "nearly.png"},
        {**wide, "mask": "none.png"},
        none,
        {**none, "mask": "broken.png"},
        {"image": "", "mask": "tall.png"},
        {**wide, "mask": "rounded.png", "regions": ["nearly.png", "tall.png"]},
        {**wide, "mask": "narrow.png"},
    ]
    places = ["1:mask", "3:mask", "4:image", "5:image", "5:mask", "8:mask"]
    found = bad_cells(base, rows, MASKS)
    assert list(found) == [f"metadata.json:{one}" for one in places]
    assert "100 x 64" in found["metadata.json:1:mask"]
    assert "64 x 100" in found["metadata.json:1:mask"]
    found = bad_cells(base, rows, CONDITIONS)
    places += ["1:regions", "7:regions"]
    assert sorted(found) == sorted(f"metadata.json:{one}" for one in places)


def test_only_images_with_an_alpha_channel_have_it_as_their_mask(base: Path) -> None:
    Image.new("RGBA", (64, 64), (255, 0, 0, 128)).save(base / "RGBA.png")
    Image.new("LA", (64, 64), (255, 128)).save(base / "LA.png")
    Image.new("P", (64, 64)).save(base / "clear.png", transparency=0)
    Image.new("P", (64, 64)).save(base / "P.png")
    Image.new("L", (64, 64)).save(base / "L.png")
    names = ("wide", "RGBA", "LA", "clear", "P", "L")
    rows = open_rows(base, [{"image": f"{name}.png"} for name in names], ALPHA).rows
    have_one = ["loss_mask" in row for row in rows]
    assert have_one == [False, True, True, True, False, False]
    assert load_cell(rows[1]["loss_mask"]).getpixel((0, 0))[-1] == 128
    assert load_cell(rows[1]["input_image"]).mode == "RGB"
    # A bad image is bad once.
    assert len(bad_cells(base, "image,prompt\nno.png,a\n", ALPHA)) == 1


@pytest.mark.parametrize(
    ("mode", "colour", "is_refused"),
    [("LA", (255, 0), True), ("RGBA", (0, 0, 0, 254), True), ("LA", (0, 255), False)],
)
def test_a_mask_file_with_transparent_parts_is_refused(
    mode: str, colour: tuple[int, ...], is_refused: bool, base: Path
) -> None:
    mask = Image.new(mode, (100, 64), (255,) * len(mode))
    mask.putpixel((99, 63), colour)
    mask.save(base / "cut.png")
    table = "image,mask,prompt\nwide.png,cut.png,a\n"
    if is_refused:
        found = bad_cells(base, table, MASKS)
        assert "--alpha_mask" in found["metadata.csv:2:mask"]
    else:
        assert "loss_mask" in open_rows(base, table, MASKS).rows[0]


def test_a_column_of_masks_that_is_absent_is_named_with_its_flag(base: Path) -> None:
    error = refusal(base, "image,masks,prompt\nwide.png,,a\n", MASKS)
    assert error.where == "--mask_column"
    assert "'masks'" in error.what
    data = open_rows(base, "image,prompt\nwide.png,a\n", MASKS, may_lack_masks=True)
    assert "loss_mask" not in data.columns
    # Where images are absent, that is what is to be said.
    assert "loss_mask" not in open_rows(base, "prompt\na\n", MASKS).columns
    (base / "metadata.csv").unlink()
    (base / "wide.txt").write_text("without a table")
    error = refusal(base, None, MASKS)
    assert error.where == "--mask_column"


def test_a_mask_that_leaves_nothing_is_refused_where_it_is_loaded(base: Path) -> None:
    write_mask(base, "black.png", (100, 64), 0, white=1.0)
    # White where the image is cut off.
    Image.new("L", (100, 64)).save(base / "strip.png")
    strip = Image.open(base / "strip.png")
    strip.paste(255, (0, 0, 1, 64))
    strip.save(base / "strip.png")
    table = "image,mask,prompt\nwide.png,black.png,a\nwide.png,strip.png,b\n"
    for row in open_rows(base, table, MASKS).rows:
        with pytest.raises(UsageError) as caught:
            load_cell(row["loss_mask"])
        assert "--unmasked_weight" in caught.value.help_lines[0]
    rows = open_rows(base, table, {**IMAGE, "loss_mask": ALLOWED}).rows
    assert load_cell(rows[0]["loss_mask"]).getextrema() == (0, 0)


@pytest.mark.parametrize("resolution", [OWN_SIZES, Resolution(48, 48, 2**20)], ids=str)
def test_masks_of_another_size_are_cropped_as_if_they_were_resized_first(
    base: Path, resolution: Resolution
) -> None:
    half = write_mask(base, "half.png", (25, 16), 0)
    half.resize((100, 64)).save(base / "resized.png")
    row = {"image": "wide.png", "prompt": "a"}
    names = ("half.png", "resized.png")
    rows = [{**row, "mask": name, "regions": [name, name]} for name in names]
    cells = open_rows(base, rows, CONDITIONS, resolution=resolution).rows
    small, first = (load_cell(row["mask"]) for row in cells)
    assert small.size == first.size == load_cell(cells[0]["input_image"]).size
    gap = np.abs(np.asarray(small, int) - np.asarray(first, int))
    # Resampled once or twice, edges differ a little; shifted, they would by 255.
    assert gap.max() < 40
    for region in load_cell(cells[0]["regions"]):
        assert np.array_equal(region, small)
    # A control image as large as its image has the cell, and so the key, of one alone.
    alone, control = (
        open_rows(
            base,
            rows,
            {**IMAGE, "mask": Column("mask", "image", multiple=16, of=of)},
            resolution=resolution,
        ).rows[1]["mask"]
        for of in ("", "input_image")
    )
    assert alone == control


def test_a_mask_of_0_and_1_is_one_of_0_and_255(base: Path) -> None:
    half = np.repeat([[0, 1]], 50, 1).repeat(64, 0).astype(np.uint8)
    Image.fromarray(half).save(base / "half.png")
    row = {"image": "wide.png", "prompt": "a", "mask": "half.png"}
    for inputs in (CONDITIONS, {**IMAGE, "mask": ALLOWED}):
        (cells,) = open_rows(base, [{**row, "regions": ["half.png"]}], inputs).rows
        for name in {"mask", "regions"} & set(cells):
            value = load_cell(cells[name])
            assert is_scaled(value)
            (mask,) = value if isinstance(value, list) else [value]
            assert np.array_equal(mask, 255 * half[:, 2:98])
    Image.fromarray(half.astype(np.uint16)).save(base / "half.png")
    (cells,) = open_rows(base, [row], CONDITIONS).rows
    assert np.array_equal(load_cell(cells["mask"]), 255 * half[:, 2:98])


@pytest.mark.parametrize("level", [2, 31])
def test_a_mask_of_labels_is_refused(level: int, base: Path) -> None:
    labels = Image.fromarray(np.tile([0, level], (64, 50)).astype(np.uint8))
    labels.save(base / "grey.png")
    labels.putpalette([0, 0, 0, *[200, 255, 0] * 255])
    labels.save(base / "palette.png")
    for name in ("grey.png", "palette.png"):
        row = {"image": "wide.png", "prompt": "a", "mask": name, "regions": [name]}
        for inputs in (CONDITIONS, {**IMAGE, "mask": ALLOWED}):
            (cells,) = open_rows(base, [row], inputs).rows
            with pytest.raises(UsageError):
                load_cell(cells["mask"])


def test_a_mask_that_is_a_video_is_one_of_0_and_255_or_refused(base: Path) -> None:
    half = np.repeat([[0, 1]], 32, 1).repeat(64, 0).astype(np.uint8)
    column = Column("mask", "video", mode="L", multiple=8, fps=16.0)
    kinds = {"some": (0, 1), "none": (0, 0), "all": (255, 255)}
    for name, frames in kinds.items():
        (base / name).mkdir()
        for number, level in enumerate(frames):
            frame = half if level == 1 else np.full_like(half, level)
            Image.fromarray(frame).save(base / name / f"{number}.png")
    rows = [{"mask": name} for name in kinds]
    some, *others = open_rows(
        base, rows, {"mask": column}, sampling=FrameSampling(2)
    ).rows
    value = load_cell(some["mask"])
    assert is_scaled(value)
    assert np.array_equal(value.pixels[1, :, :, 0], 255 * half)
    for cells in others:
        with pytest.raises(UsageError):
            load_cell(cells["mask"])


@pytest.mark.parametrize("level", [0, 1, 255])
def test_a_flat_mask_is_refused_but_for_the_loss(level: int, base: Path) -> None:
    Image.new("L", (100, 64), level).save(base / "flat.png")
    row = {"image": "wide.png", "prompt": "a", "mask": "flat.png"}
    rows = [{**row, "regions": ["flat.png"]}]
    (cells,) = open_rows(base, rows, CONDITIONS).rows
    for name in ("mask", "regions"):
        with pytest.raises(UsageError) as caught:
            load_cell(cells[name])
        assert caught.value.where == str(base / "flat.png")
    (cells,) = open_rows(base, rows, {**IMAGE, "mask": ALLOWED}).rows
    load_cell(cells["mask"])
