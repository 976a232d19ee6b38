"""What is wrong with rows is reported at once, each fault by file, row and column."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.graph import Input
from dstrain.plugin import Column, EntryCount, Measured, one_of
from PIL import Image

from tests.support.datasets import OWN_SIZES, bad_cells, open_rows, refusal

INPUTS: Mapping[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image", multiple=16),
    "edit_image": Column("edit_image", "images", multiple=16),
    "mask": Column("mask", "image", mode="L"),
    "seed": Column("seed", "integer"),
    "cfg_scale": Column("cfg_scale", "number"),
    "way": Column("way", check=one_of("left", "right")),
    "height": Measured("input_image", "height"),
}
BAD: Mapping[str, tuple[Any, ...]] = {
    "image": (
        *("none.png", "wide.png/", "../out.png", "link.png", "/etc/passwd"),
        *("deep", ".", "text.png", "thin.png", "a\0b", "fifo", ["wide.png"]),
    ),
    "edit_image": (
        *('["wide.png", ""]', "[1]", "[wide.png]", "['wide.png']", '["\\u0000"]'),
        *('["wide.png", "none.png"]', "[" * 9999 + "]"),
    ),
    "seed": ("1.0", "a", "1_000", "0x1", "9" * 20, "٣", ["1"]),
    "cfg_scale": ("nan", "inf", "1_0", "x", "1e999"),
    "prompt": (["a", "b"], "\ud800", "\udfff"),
    "way": ("up",),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with an image of 64 x 100 (height x width), wide.png."""
    (tmp_path / "data").mkdir()
    Image.new("RGB", (100, 64), "red").save(tmp_path / "data/wide.png")
    return tmp_path / "data"


def test_all_bad_cells_are_named_by_file_row_and_column(base: Path) -> None:
    (base / "deep").mkdir()
    Image.new("RGB", (32, 32)).save(base.parent / "out.png")
    (base / "link.png").symlink_to(base.parent / "out.png")
    (base / "text.png").write_text("hello")
    Image.new("RGB", (8, 200)).save(base / "thin.png")
    os.mkfifo(base / "fifo")
    cells = [(column, cell) for column, cells in BAD.items() for cell in cells]
    good = {"image": "wide.png", "way": "left"}
    found = bad_cells(base, [good | {name: cell} for name, cell in cells], INPUTS)
    wanted = [f"metadata.json:{n}:{name}" for n, (name, _) in enumerate(cells, 1)]
    assert list(found) == wanted
    for (_, cell), reason in zip(cells[:8], found.values(), strict=False):
        assert repr(cell) in reason
    assert "200 x 8" in found["metadata.json:9:image"]
    assert "\0" not in "".join(found.values())


@pytest.mark.parametrize(
    ("name", "may_be_one"),
    [
        ("a/" * 1000 + "b.png", True),
        ("é" * 255, True),
        ("é" * 256, False),
        ("a/" * 2048 + "b", False),
        ("é/" * 2100, False),
        ("/9j/4AAQSkZJRgABAQ" * 40_000, False),
        ("https://a.example/" + "x" * 4000, True),
    ],
)
def test_what_no_file_can_be_called_is_not_shown(
    base: Path, name: str, may_be_one: bool
) -> None:
    found = bad_cells(base, [{"image": name}], INPUTS)
    reason = found["metadata.json:1:image"]
    assert (name in reason) is may_be_one
    assert (f"({len(name):,}" in reason) is not may_be_one


# What a run needs.


def needed(inputs: frozenset[str], columns: tuple[str, ...]) -> None:
    """As of a run that needs a prompt and the height of an image."""
    for name, column in (("height", "image"), ("prompt", "prompt")):
        if name not in inputs:
            raise UsageError("base", f"column {column!r} is needed")


def test_blank_cells_that_are_needed_are_bad_cells(base: Path) -> None:
    rows = ("wide.png,a,", ",b,", "b.png,c,wide.png", ",d,none.png", "wide.png")
    table = "\n".join(["image,prompt,mask", *rows])
    columns = ("3:image", "4:image", "5:mask", "5:image", "6")
    found = bad_cells(base, table, INPUTS, needed)
    assert list(found) == [f"metadata.csv:{one}" for one in columns]
    table = "image,prompt,mask\nwide.png,,\nwide.png,a,wide.png\n"
    assert len(open_rows(base, table, INPUTS, needed).rows) == 2


def test_a_column_that_is_missing_is_named_with_those_there_are(base: Path) -> None:
    error = refusal(base, "image,description\nnone.png,b\n", INPUTS, needed)
    assert error.where == f"{base}/metadata.csv"
    assert "'prompt'" in error.what
    lines = "\n".join(error.help_lines)
    assert "'image', 'description'" in lines and "--column" in lines


# Cells of a row that have to fit together.


FITTING: Mapping[str, Input] = {
    "prompts": Column("texts", "texts"),
    "masks": Column("masks", "images", multiple=16, entries=EntryCount("prompts")),
    "layers": Column(
        "image",
        "images",
        multiple=16,
        entries=EntryCount("count", more=1),
        same_size=True,
    ),
    "count": Column("count", "integer"),
}


def changed(base: Path, *changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows that fit but for these changes."""
    Image.new("RGB", (48, 64)).save(base / "tall.png")
    good = {"texts": ["a", "b"], "masks": ["wide.png"] * 2, "image": ["wide.png"] * 2}
    return [{**good, "count": 1, **change} for change in changes]


def test_rows_whose_counts_differ_are_all_named_with_both_numbers(base: Path) -> None:
    rows = changed(
        base,
        {},
        {"masks": ["wide.png"]},
        {"texts": ["a", "b", "c"], "count": 0},
        {"image": ["wide.png"] * 3},
    )
    found = bad_cells(base, rows, FITTING)
    numbers = {
        place: [word for word in reason.replace(":", "").split() if word.isdigit()]
        for place, reason in found.items()
    }
    assert numbers == {
        "metadata.json:2:masks": ["1", "2", "2"],
        "metadata.json:3:masks": ["2", "3", "3"],
        "metadata.json:3:image": ["2", "0", "1"],
        "metadata.json:4:image": ["3", "1", "2"],
    }
    skipping = open_rows(base, rows, FITTING, on_bad_sample="skip")
    assert skipping.sample_ids[:, 0].tolist() == [0]


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_no_row_is_skipped_for_the_encoding_of_its_table(name: str, base: Path) -> None:
    table = 'prompt,image\n"caf\xe9",wide.png\ntea,wide.png\n'
    if name.endswith("l"):
        table = '{"prompt": "caf\xe9"}\n{"prompt": "tea"}\n'
    (base / name).write_bytes(table.encode("latin-1"))
    error = refusal(base, None, {"prompt": Column("prompt")}, on_bad_sample="skip")
    assert "prompt: is not UTF-8 text (byte 0xe9)" in str(error)


def test_images_of_several_sizes_are_named_unless_scaled(base: Path) -> None:
    mixed = changed(base, {"image": ["wide.png", "tall.png"]})
    (reason,) = bad_cells(base, mixed, FITTING).values()
    assert "64 x 96, 64 x 48" in reason
    fixed = type(OWN_SIZES)(32, 32, 1)
    assert len(open_rows(base, mixed, FITTING, resolution=fixed).rows) == 1


def test_bad_files_are_said_with_those_that_are_not_read(base: Path) -> None:
    (base / "sofa.jpg").write_text("no image")
    (base / "IMG_1.heic").touch()
    for name in ("wide", "sofa", "IMG_1"):
        (base / f"{name}.txt").write_text("a dog")
    bad, unread = refusal(base, None, INPUTS).help_lines
    assert bad.startswith("sofa.jpg: ")
    assert "sofa.jpg" not in bad.removeprefix("sofa.jpg: ")
    assert "IMG_1.heic" in unread
    other = refusal(base, None, INPUTS, file_keys=("imagee",))
    assert "IMG_1.heic" not in str(other)
