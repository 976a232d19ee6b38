"""Every row of a dataset is checked before anything is decoded, and cells load
anywhere.
"""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import UsageError
from dstrain.data import Cell, DataConfig, Dataset, Resolution, load_cell, open_dataset
from dstrain.data.forms import read_metadata
from dstrain.data.row_checks import input_columns
from dstrain.graph import Input, MaskColumn
from dstrain.plugin import Column, Constant, InferenceOnly, Measured
from PIL import Image
from safetensors.torch import save_file

DYNAMIC = Resolution(None, None, 1024 * 1024)
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
    """A folder with images wide.png (64 x 100), tall.png (100 x 64) and
    deep/square.png (48 x 48).
    """
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    for name, size in {
        "wide.png": (100, 64),
        "tall.png": (64, 100),
        "deep/square.png": (48, 48),
    }.items():
        Image.new("RGB", size, "red").save(folder / name)
    return folder


def opened(
    base: Path, metadata: str | list[dict[str, Any]], **settings: Any
) -> Dataset:
    return open_dataset(
        config(base, metadata, **settings), settings.get("inputs", INPUTS)
    )


def config(
    base: Path, metadata: str | list[dict[str, Any]], **settings: Any
) -> DataConfig:
    path = base / ("metadata.csv" if isinstance(metadata, str) else "metadata.json")
    path.write_text(metadata if isinstance(metadata, str) else json.dumps(metadata))
    resolution = settings.get("resolution", DYNAMIC)
    return DataConfig(
        base,
        None,
        settings.get("file_keys"),
        resolution,
        settings.get("extra_inputs", ()),
    )


def refused(
    base: Path, metadata: str | list[dict[str, Any]], **settings: Any
) -> UsageError:
    with pytest.raises(UsageError) as caught:
        opened(base, metadata, **settings)
    return caught.value


def test_a_row_becomes_cells_and_sizes_are_known_before_decoding(base: Path) -> None:
    data = opened(
        base, "image,prompt,seed,cfg_scale,mask\nwide.png,a dog,0001,2.5,tall.png\n"
    )
    row = data.rows[0]
    assert {name: cell.literal for name, cell in row.items() if not cell.files} == {
        "prompt": "a dog", "seed": 1, "cfg_scale": 2.5, "height": 64, "width": 96,
    }  # fmt: skip
    assert row["input_image"].shapes == ((1, 64, 96),)
    assert row["mask"].shapes == ((1, 100, 64),)
    assert row["input_image"].files == (str((base / "wide.png").resolve()),)
    assert row["input_image"].parameters == (
        ("loader", 2),
        ("mode", "RGB"),
        ("sizes", ((64, 96),)),
    )
    assert data.unused_columns == ()


def test_cells_load_at_the_size_they_tell(base: Path) -> None:
    row = opened(
        base,
        [
            {
                "image": "wide.png",
                "mask": "tall.png",
                "edit_image": ["tall.png", "wide.png"],
            }
        ],
    ).rows[0]
    assert load_cell(row["input_image"]).size == (96, 64)
    mask = load_cell(row["mask"])
    assert (mask.mode, mask.size) == ("L", (64, 100))
    assert [image.size for image in load_cell(row["edit_image"])] == [
        (64, 96),
        (96, 64),
    ]
    assert load_cell(row["height"]) == 64


def test_a_fixed_size_holds_for_every_image_that_is_resized(base: Path) -> None:
    row = opened(
        base, "image,mask\ntall.png,tall.png\n", resolution=Resolution(32, 48, 1)
    ).rows[0]
    assert load_cell(row["input_image"]).size == (48, 32) and load_cell(
        row["mask"]
    ).size == (64, 100)
    assert (row["height"].literal, row["width"].literal) == (32, 48)


def test_a_blank_text_is_empty_and_a_blank_file_or_number_is_absent(base: Path) -> None:
    data = opened(base, "image,edit_image,prompt,seed,cfg_scale\n,,,,\n , [] ,NA, ,\n")
    assert [
        {name: cell.literal for name, cell in row.items()} for row in data.rows
    ] == [
        {"prompt": ""},
        {"prompt": "NA"},
    ]


@pytest.mark.parametrize(
    "written", ["wide.png", '["wide.png"]', ' ["wide.png", "deep/square.png"]']
)
def test_a_list_of_files_in_csv_is_json_or_one_name(base: Path, written: str) -> None:
    quoted = written.replace('"', '""')
    cell = opened(base, f'edit_image\n"{quoted}"\n').rows[0]["edit_image"]
    assert [Path(file).name for file in cell.files] == ["wide.png", "square.png"][
        : 1 + written.count(",")
    ]
    assert cell.shapes[0] == (1, 64, 96)
    assert len(load_cell(cell)) == len(cell.files)


def test_brackets_and_blanks_in_file_names_are_part_of_the_name(base: Path) -> None:
    (base / "[1] a.png").write_bytes((base / "wide.png").read_bytes())
    row = opened(base, "image,edit_image\n[1] a.png,[1] a.png\n").rows[0]
    assert (
        row["input_image"].files
        == row["edit_image"].files
        == (str((base / "[1] a.png").resolve()),)
    )


BAD_CELLS = {
    "image": (
        "none.png",
        "../out.png",
        "link.png",
        "/etc/passwd",
        "deep",
        ".",
        "text.png",
        "thin.png",
        "a\0b",
        "fifo",
    ),
    "edit_image": (
        '["wide.png", ""]',
        "[1]",
        "[wide.png]",
        '["wide.png", "none.png"]',
        "[" * 9999 + "]",
    ),
    "seed": ("1.0", "a", "1_000", "0x1", "9" * 20, "٣"),
    "cfg_scale": ("nan", "inf", "1_0", "x", "1e999"),
}


def test_all_bad_cells_are_reported_at_once_with_file_row_and_column(
    base: Path,
) -> None:
    Image.new("RGB", (32, 32)).save(base.parent / "out.png")
    (base / "link.png").symlink_to(base.parent / "out.png")
    (base / "text.png").write_text("hello")
    Image.new("RGB", (8, 200)).save(base / "thin.png")
    os.mkfifo(base / "fifo")
    cells = [(column, cell) for column, cells in BAD_CELLS.items() for cell in cells]
    records = [{"image": "wide.png", column: cell} for column, cell in cells]
    error = refused(base, records)
    assert error.what == f"{len(cells)} bad values"
    assert [line.split(": ")[0] for line in error.help_lines] == [
        f"metadata.json:{number}:{column}"
        for number, (column, _) in enumerate(cells, 1)
    ]
    said = "\n".join(error.help_lines)
    for words in (
        "no such file 'none.png'",
        "'../out.png' points outside the dataset's folder",
        "'link.png' points outside",
        "'/etc/passwd' points outside",
        "'deep' is not a regular file",
        "'fifo' is not a regular file",
        "'text.png' is not an image in a supported format",
        "200 x 8 (height x width) is too small for sides that are multiples of 16",
        "metadata.json:11:edit_image: has a blank file name",
        "'1.0' is not an integer",
        "'nan' is not a finite number",
    ):
        assert words in said


def test_bad_files_of_a_folder_are_said_with_those_of_kinds_that_are_not_read(
    tmp_path: Path,
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "dog.jpg")
    (tmp_path / "sofa.jpg").write_bytes((tmp_path / "dog.jpg").read_bytes()[:99])
    (tmp_path / "IMG_1.heic").touch()
    for name in ("dog", "sofa", "IMG_1"):
        (tmp_path / f"{name}.txt").write_text("a dog")
    with pytest.raises(UsageError) as caught:
        open_dataset(DataConfig(tmp_path, None, None, DYNAMIC), INPUTS)
    bad, unread = caught.value.help_lines
    # The name of the file once.
    assert bad.startswith("sofa.jpg: cannot be read: ")
    what = "1 file is of a kind that is not read, such as IMG_1.heic; convert it to"
    assert unread.startswith(what)


def test_fifty_bad_cells_are_listed_and_the_others_counted(base: Path) -> None:
    error = refused(
        base, "image\n" + "".join(f"{number}.png\n" for number in range(60))
    )
    assert error.what == "60 bad values" and len(error.help_lines) == 51
    assert error.help_lines[49:] == (
        "metadata.csv:51:image: no such file '49.png'",
        "and 10 more",
    )


def test_lists_and_half_characters_are_refused_where_one_text_is_read(
    base: Path,
) -> None:
    records = [
        {"prompt": ["a", "b"]},
        {"image": ["wide.png"]},
        {"seed": ["1"]},
        {"prompt": "\ud800"},
    ]
    assert [line.split(":")[1] for line in refused(base, records).help_lines] == [
        "1",
        "2",
        "3",
        "4",
    ]


def test_bad_rows_and_bad_cells_are_reported_together(base: Path) -> None:
    error = refused(
        base, "image,prompt\nnone.png,a\nwide.png\nwide.png,b\nwide.png,c,d\n"
    )
    assert error.what == "3 bad rows"
    assert [line.split(": ")[0] for line in error.help_lines] == [
        "metadata.csv:2:image", "metadata.csv:3", "metadata.csv:5",
    ]  # fmt: skip


def test_a_list_that_is_not_json_is_refused(base: Path) -> None:
    (line,) = refused(base, [{"edit_image": "['wide.png']"}]).help_lines
    assert 'edit_image: is not a list of texts such as ["a.png", "b.png"]' in line


def test_a_slash_behind_a_file_is_no_name_of_it(base: Path) -> None:
    assert (
        "no such file 'wide.png/'" in refused(base, "image\nwide.png/\n").help_lines[0]
    )


def test_files_inside_the_folder_may_be_named_by_absolute_paths_dots_and_links(
    base: Path,
) -> None:
    (base / "link.png").symlink_to("wide.png")
    folder = base.parent / "way"
    folder.symlink_to(base)
    metadata = f"image\n{base.resolve()}/wide.png\ndeep/../wide.png\nlink.png\n{folder}/wide.png\n"
    data = opened(folder, metadata)
    real = str(base.resolve())
    # As they are named in the folder: a link may be changed later.
    assert [row["input_image"].files for row in data.rows] == [
        (f"{real}/wide.png",),
        (f"{real}/deep/../wide.png",),
        (f"{real}/link.png",),
        (f"{folder}/wide.png",),
    ]
    assert {os.path.realpath(row["input_image"].files[0]) for row in data.rows} == {
        f"{real}/wide.png"
    }


def test_an_extra_column_is_read_only_where_it_is_asked_for(base: Path) -> None:
    inputs = {**INPUTS, "mask": Column("mask", "image", mode="L", optional=True)}
    metadata = "image,mask,prompt\nwide.png,wide.png,a\n"
    assert "mask" not in opened(base, metadata, inputs=inputs).rows[0]
    assert (
        "mask" in opened(base, metadata, inputs=inputs, extra_inputs=("mask",)).rows[0]
    )


def test_file_keys_leave_out_the_other_file_columns(base: Path) -> None:
    metadata = "image,edit_image,prompt\nwide.png,none.png,a\n"
    data = opened(base, metadata, file_keys=("image",))
    assert list(data.rows[0]) == ["prompt", "input_image", "height", "width"]
    assert data.unused_columns == ("edit_image",)
    assert list(opened(base, metadata, file_keys=()).rows[0]) == ["prompt"]


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            {"file_keys": ("imagee",)},
            "--data_file_keys: no input loads a file from column 'imagee'; did you mean 'image'?",
        ),
        (
            {"file_keys": ("prompt",)},
            "--data_file_keys: no input loads a file from column 'prompt'",
        ),
        (
            {"file_keys": ("edit_image",)},
            "--data_file_keys: no input loads a file from column 'edit_image'",
        ),
        (
            {"file_keys": ("other",)},
            "--data_file_keys: no input loads a file from column 'other'",
        ),
        (
            {"extra_inputs": ("edit_imag",)},
            "--extra_inputs: no column of metadata.csv gives input 'edit_imag'\n  inputs: prompt,",
        ),
        (
            {"extra_inputs": ("edit_image",)},
            "mask, seed, cfg_scale\n  columns: image, prompt, other, edit_imag\n",
        ),
        (
            {"extra_inputs": ("input_image",), "file_keys": ()},
            "columns: image, prompt, other, edit_imag\n  columns whose files are loaded: none",
        ),
        (
            {"extra_inputs": ("latents",)},
            "--extra_inputs: no column of metadata.csv gives input 'latents'",
        ),
        (
            {"resolution": Resolution(50, 64, 1)},
            "--height: 50 is not a multiple of 16; the nearest is 48",
        ),
    ],
)
def test_settings_that_fit_no_column_are_refused(
    base: Path, settings: Any, said: str
) -> None:
    assert said in str(
        refused(base, "image,prompt,other,edit_imag\nwide.png,a,b,c\n", **settings)
    )


def test_extra_inputs_may_be_named_as_input_or_as_column(base: Path) -> None:
    opened(
        base,
        "image,prompt\nwide.png,a\n",
        extra_inputs=("input_image", "image", "prompt"),
    )


def test_a_dataset_has_rows(base: Path) -> None:
    assert "has no rows" in str(refused(base, "image,prompt\n"))


def test_metadata_may_lie_elsewhere_and_files_need_their_folder(base: Path) -> None:
    path = base.parent / "else.csv"
    path.write_text("image\nwide.png\n")
    assert len(open_dataset(DataConfig(base, path, None, DYNAMIC), INPUTS).rows) == 1
    with pytest.raises(
        UsageError, match=r"--dataset_base_path: .*none is not a folder"
    ):
        open_dataset(DataConfig(base / "none", path, None, DYNAMIC), INPUTS)


def test_a_header_tells_the_inputs_without_rows_or_files(tmp_path: Path) -> None:
    settings = config(tmp_path, "image,prompt\n")
    assert list(
        input_columns(read_metadata(tmp_path / "metadata.csv"), settings, INPUTS)
    ) == ["prompt", "input_image"]


def test_cells_pickle_small_and_load_in_spawned_processes(base: Path) -> None:
    cell = opened(base, "image\nwide.png\n").rows[0]["input_image"]
    assert len(pickle.dumps(cell)) < 300 + len(cell.files[0])
    assert pickle.loads(pickle.dumps(cell)) == cell  # noqa: S301  (what it reads was written on this line)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as workers:
        assert workers.submit(load_cell, cell).result().size == (96, 64)


def test_a_file_damaged_since_it_was_checked_is_named(base: Path) -> None:
    cell = opened(base, "image\nwide.png\n").rows[0]["input_image"]
    Path(cell.files[0]).write_bytes(Path(cell.files[0]).read_bytes()[:60])
    with pytest.raises(UsageError, match=r"wide\.png: cannot be read"):
        load_cell(cell)
    assert load_cell(Cell("text", "a")) == "a"


def test_workers_import_no_torch() -> None:
    code = "import sys, dstrain.data.row_checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_constants_of_the_variant_are_cells_of_every_row(base: Path) -> None:
    inputs = {
        "prompt": Column("prompt"),
        "edit_pixels": Constant(4096),
        "shift": Constant(3.0),
        "mode": Constant("plain"),
    }
    data = opened(base, "prompt\na\nb\n", inputs=inputs)
    for row in data.rows:
        cells = {
            name: (row[name].kind, row[name].literal)
            for name in ("edit_pixels", "shift", "mode")
        }
        assert cells == {
            "edit_pixels": ("integer", 4096),
            "shift": ("number", 3.0),
            "mode": ("text", "plain"),
        }
    assert [*map(tuple, data.sample_ids.tolist())] == [*((0, 0), (1, 0))]


# Masks: `mask` is of `input_image`, which is first.
MASKS: Mapping[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image", multiple=16),
    "loss_mask": MaskColumn(
        "mask", "image", mode="L", of="input_image", not_empty=True
    ),
}
ALPHA: Mapping[str, Input] = {
    **MASKS,
    "loss_mask": MaskColumn("image", "image", mode="RGBA", of="input_image"),
}


def write_mask(base: Path, name: str, size: tuple[int, int], level: int = 255) -> None:
    Image.new("L", size, level).save(base / name)


def test_a_mask_is_cut_as_the_image_that_it_is_of(base: Path) -> None:
    write_mask(base, "whole.png", (100, 64))
    write_mask(base, "half.png", (50, 32))
    table = (
        "image,mask,prompt\nwide.png,whole.png,a\nwide.png,half.png,b\nwide.png,,c\n"
    )
    rows = opened(base, table, inputs=MASKS).rows
    assert [row["loss_mask"].shapes for row in rows[:2]] == [((1, 64, 96),)] * 2
    assert "loss_mask" not in rows[2]
    assert load_cell(rows[1]["loss_mask"]).size == (96, 64)
    assert load_cell(rows[1]["loss_mask"]).mode == "L"
    fixed = Resolution(32, 32, 2**20)
    (row,) = opened(
        base, "\n".join(table.splitlines()[:2]), inputs=MASKS, resolution=fixed
    ).rows
    assert row["loss_mask"].shapes == row["input_image"].shapes


def test_masks_that_do_not_fit_are_named_with_all_other_bad_cells(base: Path) -> None:
    write_mask(base, "tall-mask.png", (64, 100))
    write_mask(base, "nearly.png", (33, 21))
    (base / "broken.png").write_bytes((base / "tall-mask.png").read_bytes()[:50])
    faults = refused(
        base,
        "image,mask,prompt\n"
        "wide.png,tall-mask.png,a\n"
        "wide.png,nearly.png,b\n"
        "wide.png,none.png,c\n"
        "none.png,tall-mask.png,d\n"
        "none.png,broken.png,e\n",
        inputs=MASKS,
    ).help_lines
    assert [line.split(": ")[0].strip() for line in faults] == [
        "metadata.csv:2:mask",
        "metadata.csv:4:mask",
        "metadata.csv:5:image",
        "metadata.csv:6:image",
        "metadata.csv:6:mask",
    ]
    assert "'tall-mask.png' is 100 x 64, and what it masks 64 x 100" in faults[0]
    assert "expected that size or its aspect ratio" in faults[0]


def test_only_images_with_an_alpha_channel_have_it_as_their_mask(base: Path) -> None:
    Image.new("RGBA", (64, 64), (255, 0, 0, 128)).save(base / "alpha.png")
    table = "image,prompt\nwide.png,a\nalpha.png,b\n"
    first, second = opened(base, table, inputs=ALPHA).rows
    assert "loss_mask" not in first
    assert load_cell(second["loss_mask"]).getpixel((0, 0))[-1] == 128
    assert load_cell(second["input_image"]).mode == "RGB"
    # A bad image is bad once.
    error = refused(base, "image,prompt\nno.png,a\n", inputs=ALPHA)
    assert error.what == "1 bad value"


def test_a_column_of_masks_that_is_absent_is_named_with_its_flag(base: Path) -> None:
    with pytest.raises(UsageError, match="no column 'mask'") as caught:
        opened(base, "image,masks,prompt\nwide.png,,a\n", inputs=MASKS)
    assert caught.value.where == "--mask_column"
    assert "did you mean 'masks'?" in caught.value.what
    # Where images are absent, that is what is to be said.
    assert "loss_mask" not in opened(base, "prompt\na\n", inputs=MASKS).columns


def test_masks_are_loaded_whatever_the_file_keys(base: Path) -> None:
    write_mask(base, "mask.png", (100, 64))
    table = "image,mask,prompt\nwide.png,mask.png,a\n"
    dataset = opened(base, table, inputs=MASKS, file_keys=("image",))
    assert set(dataset.columns) == {"prompt", "input_image", "loss_mask"}


def test_a_mask_that_leaves_nothing_is_refused_where_it_is_loaded(base: Path) -> None:
    write_mask(base, "black.png", (100, 64), 0)
    # White where the image is cut off.
    strip = Image.new("L", (100, 64), 0)
    strip.paste(255, (0, 0, 1, 64))
    strip.save(base / "strip.png")
    table = "image,mask,prompt\nwide.png,black.png,a\nwide.png,strip.png,b\n"
    for row in opened(base, table, inputs=MASKS).rows:
        with pytest.raises(UsageError, match="nothing is left to train") as caught:
            load_cell(row["loss_mask"])
        assert "--unmasked_weight" in caught.value.help_lines[0]
    allowed = MaskColumn("mask", "image", mode="L", of="input_image")
    rows = opened(base, table, inputs={**MASKS, "loss_mask": allowed}).rows
    assert load_cell(rows[0]["loss_mask"]).getextrema() == (0, 0)


def test_a_folder_with_captions_has_no_masks_in_a_column(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (16, 16)).save(folder / "a.png")
    (folder / "a.txt").write_text("a")
    inputs = {
        "input_image": Column("image", "image"),
        "mask": MaskColumn("mask", "image", of="input_image"),
    }
    with pytest.raises(UsageError, match="need a table with the columns image, prompt"):
        open_dataset(DataConfig(folder, None, None, DYNAMIC), inputs)


@pytest.mark.parametrize(
    ("mode", "colour", "is_refused"),
    [("LA", (255, 0), True), ("RGBA", (0, 0, 0, 254), True), ("LA", (0, 255), False)],
)
def test_a_mask_file_with_transparent_parts_is_refused(
    mode: str, colour: tuple[int, ...], is_refused: bool, base: Path
) -> None:
    mask = Image.new(mode, (100, 64), (*[255] * (len(mode) - 1), 255))
    mask.putpixel((99, 63), colour)
    mask.save(base / "cut.png")
    table = "image,mask,prompt\nwide.png,cut.png,a\n"
    if not is_refused:
        assert "loss_mask" in opened(base, table, inputs=MASKS).rows[0]
        return
    what = refused(base, table, inputs=MASKS)
    assert "2:mask: 'cut.png' has transparent parts" in str(what)
    assert "--alpha_mask" in str(what)


# Clips


# As MASKS, but for conditions that a variant reads, one mask or several.
CONDITIONS: Mapping[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image", multiple=16),
    "mask": Column("mask", "image", mode="L", multiple=16, of="input_image"),
    "regions": Column("regions", "images", mode="L", multiple=16, of="input_image"),
}


def write_half(base: Path, name: str, size: tuple[int, int]) -> Image.Image:
    """Write a mask of which the right half is white."""
    mask = Image.new("L", size)
    mask.paste(255, (size[0] // 2, 0, *size))
    mask.save(base / name)
    return mask


@pytest.mark.parametrize("resolution", [DYNAMIC, Resolution(48, 48, 2**20)], ids=str)
def test_masks_of_another_size_are_cropped_as_if_they_were_resized_first(
    base: Path, resolution: Resolution
) -> None:
    half = write_half(base, "half.png", (25, 16))
    half.resize((100, 64)).save(base / "resized.png")
    row = {"image": "wide.png", "prompt": "a"}
    rows = opened(
        base,
        [
            {**row, "mask": name, "regions": [name, name]}
            for name in ("half.png", "resized.png")
        ],
        inputs=CONDITIONS,
        resolution=resolution,
    ).rows
    small, first = (load_cell(row["mask"]) for row in rows)
    assert small.size == first.size == load_cell(rows[0]["input_image"]).size
    gap = np.abs(np.asarray(small, int) - np.asarray(first, int))
    # Resampled once or twice, edges differ a little; shifted, they would by 255.
    assert gap.max() < 40
    for region in load_cell(rows[0]["regions"]):
        assert np.array_equal(region, small)


def test_masks_as_large_as_their_image_have_the_cell_of_an_image(base: Path) -> None:
    write_half(base, "mask.png", (100, 64))
    plain = {**CONDITIONS, "mask": Column("mask", "image", mode="L", multiple=16)}
    rows = [{"image": "wide.png", "prompt": "", "mask": "mask.png", "regions": []}]
    cells = [
        opened(base, rows, inputs=inputs).rows[0]["mask"]
        for inputs in (CONDITIONS, plain)
    ]
    # And with it their key in the feature cache.
    assert cells[0] == cells[1]


def test_masks_of_another_aspect_ratio_or_with_transparent_parts_are_refused(
    base: Path,
) -> None:
    write_half(base, "tall-mask.png", (64, 100))
    Image.new("RGBA", (100, 64), (0, 0, 0, 0)).save(base / "clear.png")
    rows = [
        {"image": "wide.png", "mask": "tall-mask.png", "regions": ["clear.png"]},
        # What it is of is bad itself: then it is not compared.
        {"image": "none.png", "mask": "tall-mask.png"},
        {"image": "", "mask": "tall-mask.png"},
    ]
    error = refused(base, rows, inputs=CONDITIONS)
    places = [line.split(": ")[0].strip() for line in error.help_lines]
    assert places == [
        "metadata.json:1:mask",
        "metadata.json:1:regions",
        "metadata.json:2:image",
    ]
    assert "expected that size or its aspect ratio" in error.help_lines[0]
    assert error.help_lines[1].endswith("a mask cannot have: save it without")


def test_a_file_of_tensors_is_known_by_its_header_and_read_as_a_record(
    base: Path,
) -> None:
    inputs = {**INPUTS, "path": Column("path", "tensors")}
    for name, steps in (("a", 2), ("b", 3), ("c", 2)):
        tensors = {"latents": torch.full((1, steps), 7.0), "sigmas": torch.ones(1)}
        save_file(tensors, base / f"{name}.safetensors")
    rows = [{"prompt": "", "path": f"{name}.safetensors"} for name in "abc"]
    dataset = opened(base, rows, inputs=inputs)
    cells = [row["path"] for row in dataset.rows]
    assert [cell.shapes for cell in cells] == [
        ((1, 2), (1,)),
        ((1, 3), (1,)),
        ((1, 2), (1,)),
    ]
    assert dataset.groups.tolist() == [0, 1, 0]
    value = load_cell(cells[1])
    assert sorted(value) == ["latents", "sigmas"]
    assert value["latents"].tolist() == [[7.0, 7.0, 7.0]]


def test_a_file_that_is_none_of_tensors_is_a_bad_cell(base: Path) -> None:
    inputs = {**INPUTS, "path": Column("path", "tensors")}
    rows = [{"prompt": "", "path": name} for name in ("wide.png", "d.safetensors")]
    with pytest.raises(UsageError, match="2 bad values") as caught:
        opened(base, rows, inputs=inputs)
    first, second = caught.value.help_lines
    assert "'wide.png' cannot be read as safetensors" in first
    assert "no such file 'd.safetensors'" in second
