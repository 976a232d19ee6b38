"""A row becomes cells whose sizes are known before anything is decoded."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, UsageError
from dstrain.data import Cell, Resolution, load_cell
from dstrain.data.variants import AugmentationOptions
from dstrain.graph import Input
from dstrain.plugin import Column, InferenceOnly, Measured
from PIL import Image
from safetensors.torch import save_file

from tests.support.datasets import bad_cells, open_rows, refusal

INPUTS: Mapping[str, Input] = {
    "prompt": Column("prompt"),
    "negative_prompt": Column("negative_prompt"),
    "input_image": Column("image", "image", multiple=16),
    "edit_image": Column("edit_image", "images", multiple=16),
    "mask": Column("mask", "image", mode="L"),
    "seed": Column("seed", "integer"),
    "cfg_scale": Column("cfg_scale", "number"),
    "height": Measured("input_image", "height"),
    "width": Measured("input_image", "width"),
    "latents": InferenceOnly(),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with wide.png (64 x 100), tall.png (100 x 64), deep/square.png (48 x 48)."""
    (tmp_path / "data/deep").mkdir(parents=True)
    sizes = {"wide": (100, 64), "tall": (64, 100), "deep/square": (48, 48)}
    for name, size in sizes.items():
        Image.new("RGB", size, "red").save(tmp_path / f"data/{name}.png")
    return tmp_path / "data"


def literals(cells: Mapping[str, Cell]) -> dict[str, Any]:
    return {name: cell.literal for name, cell in cells.items() if not cell.files}


def test_a_row_becomes_cells_and_sizes_are_known_before_decoding(base: Path) -> None:
    table = "image,prompt,seed,cfg_scale,mask\nwide.png,a dog, 0001,2.5,tall.png\n"
    data = open_rows(base, table, INPUTS)
    (row,) = data.rows
    measured = {"height": 64, "width": 96}
    written = {"prompt": "a dog", "seed": 1, "cfg_scale": 2.5}
    assert literals(row) == {**written, **measured}
    assert row["input_image"].shapes == ((1, 64, 96),)
    assert row["mask"].shapes == ((1, 100, 64),)
    assert row["input_image"].files == (str((base / "wide.png").resolve()),)
    # A change of these computes all cached values again.
    parameters = (("loader", 3), ("mode", "RGB"), ("sizes", ((64, 96),)))
    assert row["input_image"].parameters == parameters
    assert data.unused_columns == ()


def test_a_blank_text_is_empty_and_a_blank_file_or_number_is_absent(base: Path) -> None:
    table = "image,edit_image,prompt,seed,cfg_scale\n,,,,\n , [] ,NA, ,\n"
    found = [dict(row) for row in open_rows(base, table, INPUTS).rows]
    assert found == [{"prompt": Cell("text", text)} for text in ("", "NA")]


def test_texts_and_numbers_are_read_as_they_are_written(base: Path) -> None:
    texts = ["a dog \U0001f415 and \u2028", "\t a\r\nb ", "", '"x", y', "[z]"]
    rows = [{"prompt": text, "seed": n - 10**17} for n, text in enumerate(texts)]
    assert [literals(row) for row in open_rows(base, rows, INPUTS).rows] == rows


@pytest.mark.parametrize(
    "written", ["wide.png", '["wide.png"]', ' ["wide.png", "deep/square.png"]']
)
def test_a_list_of_files_in_csv_is_json_or_one_name(base: Path, written: str) -> None:
    quoted = written.replace('"', '""')
    (row,) = open_rows(base, f'edit_image\n"{quoted}"\n', INPUTS).rows
    cell = row["edit_image"]
    wanted = ["wide.png", "square.png"][: 1 + written.count(",")]
    assert [Path(file).name for file in cell.files] == wanted
    assert cell.shapes[0] == (1, 64, 96)
    assert len(load_cell(cell)) == len(wanted)


def test_files_inside_the_folder_may_have_any_name_that_leads_there(base: Path) -> None:
    (base / "[1] a.png").write_bytes((base / "wide.png").read_bytes())
    (base / "link.png").symlink_to("wide.png")
    (base.parent / "way").symlink_to(base)
    real, way = base.resolve(), base.parent / "way"
    absolute, through_link = f"{real}/wide.png", f"{way}/wide.png"
    relative = ["deep/../wide.png", "link.png", "[1] a.png"]
    names = [absolute, through_link, *relative]
    rows = open_rows(way, [{"image": name} for name in names], INPUTS).rows
    found = [row["input_image"].files[0] for row in rows]
    # As they are named in the folder: a link may be changed later.
    assert found == [absolute, through_link, *(f"{real}/{name}" for name in relative)]
    assert {os.path.realpath(path) for path in found[:4]} == {absolute}
    (row,) = open_rows(base, [{"edit_image": "[1] a.png"}], INPUTS).rows
    assert row["edit_image"].files == (f"{real}/[1] a.png",)


def test_an_extra_column_is_read_only_where_it_is_asked_for(base: Path) -> None:
    inputs = {**INPUTS, "mask": Column("mask", "image", mode="L", optional=True)}
    table = "image,mask,prompt\nwide.png,wide.png,a\n"
    assert "mask" not in open_rows(base, table, inputs).rows[0]
    assert "mask" in open_rows(base, table, inputs, extra_inputs=("mask",)).rows[0]
    # By the input or its column.
    both = ("input_image", "image", "prompt")
    open_rows(base, table, inputs, extra_inputs=both)


@pytest.mark.parametrize(
    ("settings", "flag", "named"),
    [
        ({"file_keys": ("imagee",)}, "--data_file_keys", "'image'"),
        ({"file_keys": ("prompt",)}, "--data_file_keys", "'prompt'"),
        ({"file_keys": ("edit_image",)}, "--data_file_keys", "'edit_image'"),
        ({"file_keys": ("other",)}, "--data_file_keys", "'other'"),
        ({"extra_inputs": ("edit_imag",)}, "--extra_inputs", "mask, seed, cfg_scale"),
        ({"extra_inputs": ("edit_image",)}, "--extra_inputs", "image, text, other"),
        ({"extra_inputs": ("image",), "file_keys": ()}, "--extra_inputs", "none"),
        ({"extra_inputs": ("latents",)}, "--extra_inputs", "'latents'"),
        ({"resolution": Resolution(50, 64, 1)}, "--height", "48"),
    ],
)
def test_settings_that_fit_no_column_are_refused(
    base: Path, settings: Any, flag: str, named: str
) -> None:
    table = "image,text,other,edit_imag\nwide.png,a,b,c\n"
    error = refusal(base, table, INPUTS, **settings)
    assert error.where == flag
    assert named in str(error)


def test_rows_are_checked_without_torch() -> None:
    code = (
        "import sys, dstrain.data as data, dstrain.data.row_checks as checks; checks.check_rows; data.read_frames; "
        "sys.exit(bool({'torch', 'av', 'imageio'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_file_that_changed_since_it_was_checked_is_named(base: Path) -> None:
    def opened() -> Cell:
        rows = [{"edit_image": ["tall.png", "wide.png"]}]
        return open_rows(base, rows, INPUTS).rows[0]["edit_image"]

    path = base / "wide.png"
    cell, before = opened(), path.stat()
    path.chmod(0o600)
    load_cell(cell)
    os.utime(path, ns=(1, 1))
    with pytest.raises(StateError) as caught:
        load_cell(cell)
    assert caught.value.where == cell.files[1]
    cell = opened()
    path.write_bytes(path.read_bytes() + b"more")
    os.utime(path, ns=(1, 1))
    with pytest.raises(StateError):
        load_cell(cell)
    path.write_bytes(path.read_bytes()[: before.st_size // 2])
    # Damage is called so.
    with pytest.raises(UsageError) as damaged:
        load_cell(cell)
    assert damaged.value.where == cell.files[1]


def test_a_file_of_tensors_is_known_by_its_header(base: Path) -> None:
    inputs = {**INPUTS, "path": Column("path", "tensors")}
    for name, steps in (("a", 2), ("b", 3), ("c", 2)):
        tensors = {"latents": torch.full((1, steps), 7.0), "sigmas": torch.ones(1)}
        save_file(tensors, base / f"{name}.safetensors")
    rows = [{"prompt": "", "path": f"{name}.safetensors"} for name in "abc"]
    dataset = open_rows(base, rows, inputs)
    cells = [row["path"] for row in dataset.rows]
    shapes = [((1, steps), (1,)) for steps in (2, 3, 2)]
    assert [cell.shapes for cell in cells] == shapes
    assert dataset.groups.tolist() == [0, 1, 0]
    value = load_cell(cells[1])
    assert sorted(value) == ["latents", "sigmas"]
    assert value["latents"].tolist() == [[7.0, 7.0, 7.0]]
    rows = [{"prompt": "", "path": name} for name in ("wide.png", "d.safetensors")]
    bad = bad_cells(base, rows, inputs)
    assert list(bad) == [f"metadata.json:{row}:path" for row in (1, 2)]
    # No view of them can be made.
    for flag, views in (
        ("--flip", AugmentationOptions(flip=True)),
        ("--crops", AugmentationOptions(crops=2)),
    ):
        assert refusal(base, rows, inputs, augmentation=views).where == flag


def test_crops_are_refused_for_images_that_keep_their_size(base: Path) -> None:
    table = "image,mask\nwide.png,wide.png\n"
    crops = AugmentationOptions(crops=2)
    assert refusal(base, table, INPUTS, augmentation=crops).where == "--crops"
    flips = AugmentationOptions(flip=True)
    assert len(open_rows(base, table, INPUTS, augmentation=flips).rows) == 2
    # Rows are not mirrored that say where a camera goes.
    camera = {**INPUTS, "camera": Column("camera", directed=True)}
    table = "image,mask,camera\nwide.png,wide.png,Left\n"
    assert refusal(base, table, camera, augmentation=flips).where == "--flip"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_each_view_knows_the_files_size_and_what_is_cut_off(
    kind: Any, base: Path
) -> None:
    """A file of 64 x 100 is scaled to 32 x 50, of which 32 are kept."""
    axes = ("original_height", "original_width", "crop_top", "crop_left")
    inputs: dict[str, Input] = {"input_image": Column("image", kind, multiple=16)}
    inputs |= {axis: Measured("input_image", axis) for axis in axes}
    name = "wide.png"
    if kind == "video":
        name = "film"
        (base / name).mkdir()
        Image.open(base / "wide.png").save(base / name / "0.png")
    views = AugmentationOptions(flip=True, crops=2)
    size = Resolution(32, 32, 2**20)
    table = f"image\n{name}\n"
    data = open_rows(base, table, inputs, augmentation=views, resolution=size)
    found = [list(literals(row).values()) for row in data.rows]
    assert [one[:3] for one in found] == [[64, 100, 0]] * 5
    # 18 columns are cut off: at a half, a quarter, three quarters; then mirrored.
    assert sorted(one[3] for one in found) == [4, 4, 9, 14, 14]
    plain = open_rows(base, table, inputs, resolution=size)
    assert [list(literals(row).values()) for row in plain.rows] == [[64, 100, 0, 9]]
