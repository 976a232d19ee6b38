"""Rows whose files cannot be decoded are found before a run, and no file is decoded
twice.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import (
    Cell,
    DataConfig,
    Dataset,
    FrameSampling,
    Resolution,
    decoding,
    load_cell,
    open_dataset,
)
from dstrain.data.decoding import MEMORY, skip_undecodable
from dstrain.plugin import Column
from dstrain.storage import ManyFiles, file_memory
from PIL import Image

from tests.support.videos import film

DYNAMIC = Resolution(None, None, 2**20)


def everything(inputs: frozenset[str]) -> frozenset[str]:
    return inputs


def damage(path: Path) -> None:
    """Overwrite bytes in the middle of a file, which its header and end do not show."""
    content = path.read_bytes()
    at = len(content) // 2
    path.write_bytes(content[:at] + b"\xff\xd7" * 8 + content[at + 16 :])


def images(folder: Path, *names: str, rows: str = "") -> Dataset:
    """A dataset of images of noise, one in each row."""
    noise = np.random.default_rng(0)
    for name in names:
        pixels = noise.integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "metadata.csv").write_text("image\n" + (rows or "\n".join(names)))
    return reopened(folder)


def reopened(folder: Path) -> Dataset:
    config = DataConfig(folder, None, None, DYNAMIC, on_bad_sample="skip")
    return open_dataset(config, {"image": Column("image", "image", multiple=8)})


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded."""
    names: list[str] = []

    def load(cell: Cell) -> Any:
        names.extend(Path(file).name for file in cell.files)
        return load_cell(cell)

    monkeypatch.setattr(decoding, "load_cell", load)
    return names


def test_a_damaged_file_leaves_its_row_out_with_the_reason(tmp_path: Path) -> None:
    dataset = images(tmp_path, "a.png", "b.png", "c.png")
    damage(tmp_path / "b.png")
    left = skip_undecodable(dataset, everything, tmp_path)
    assert [*map(tuple, left.sample_ids.tolist())] == [*((0, 0), (2, 0))]
    (fault,) = left.skipped
    assert (fault.row, fault.column) == (1, "image")
    assert fault.reason.startswith("'b.png' cannot be read")


def test_without_a_good_row_all_faults_are_raised(tmp_path: Path) -> None:
    dataset = images(tmp_path, "a.png", "b.png")
    damage(tmp_path / "a.png")
    damage(tmp_path / "b.png")
    with pytest.raises(UsageError, match="2 bad values"):
        skip_undecodable(dataset, everything, tmp_path)


def test_a_file_in_several_rows_is_decoded_once(
    tmp_path: Path, decoded: list[str]
) -> None:
    dataset = images(tmp_path, "a.png", "b.png", rows="a.png\nb.png\na.png\n")
    damage(tmp_path / "a.png")
    left = skip_undecodable(dataset, everything, tmp_path)
    assert sorted(decoded) == ["a.png", "b.png"]
    assert [fault.row for fault in left.skipped] == [0, 2]


def test_only_what_changed_or_was_bad_is_decoded_again(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "SETTLED", 0)
    dataset = images(tmp_path, "a.png", "b.png", "c.png")
    damage(tmp_path / "b.png")
    skip_undecodable(dataset, everything, tmp_path)
    decoded.clear()
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes())
    skip_undecodable(reopened(tmp_path), everything, tmp_path)
    assert sorted(decoded) == ["b.png", "c.png"]


def test_a_file_loaded_in_another_way_is_decoded_again(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "SETTLED", 0)
    skip_undecodable(images(tmp_path, "a.png"), everything, tmp_path)
    config = DataConfig(tmp_path, None, None, Resolution(16, 16, 1))
    other = open_dataset(config, {"image": Column("image", "image", multiple=8)})
    skip_undecodable(other, everything, tmp_path)
    assert decoded == ["a.png", "a.png"]


@pytest.mark.parametrize("content", ["no json", "[]", "null", ""])
def test_an_unreadable_memory_is_an_empty_one(
    content: str, tmp_path: Path, decoded: list[str]
) -> None:
    (tmp_path / MEMORY).write_text(content)
    skip_undecodable(images(tmp_path, "a.png"), everything, tmp_path)
    assert decoded == ["a.png"]


def test_a_file_changed_just_before_is_not_remembered(tmp_path: Path) -> None:
    skip_undecodable(images(tmp_path, "a.png"), everything, tmp_path)
    memory = tmp_path / MEMORY
    assert memory.is_file() and len(ManyFiles(memory)) == 0


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    dataset = images(tmp_path, "a.png")
    skip_undecodable(dataset, everything, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def films(folder: Path, **settings: Any) -> Dataset:
    """Three videos of 12 frames, each cut into clips of 5."""
    for name in "abc":
        film(folder / f"{name}.mp4", [number / 15 for number in range(12)], 15)
    (folder / "metadata.csv").write_text("clip\na.mp4\nb.mp4\nc.mp4\n")
    sampling = FrameSampling(5, "chunk")
    resolution = Resolution(None, None, 2**20)
    data = DataConfig(
        folder, None, None, resolution, (), sampling, on_bad_sample="skip"
    )
    return open_dataset(
        data, {"clip": Column("clip", "video", multiple=8, frame_multiple=4, fps=15.0)}
    )


def test_a_row_of_several_clips_is_skipped_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = films(tmp_path)
    assert [*map(tuple, dataset.sample_ids.tolist())] == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    ]

    def load(cell: Cell) -> Any:
        if cell.files[0].endswith("b.mp4") and dict(cell.parameters)["frames"][0]:
            raise UsageError(cell.files[0], "is damaged")

    monkeypatch.setattr(decoding, "load_cell", load)
    left = skip_undecodable(dataset, lambda inputs: inputs, tmp_path)
    assert [*map(tuple, left.sample_ids.tolist())] == [
        *((0, 0), (0, 1), (2, 0), (2, 1))
    ]
    assert [(fault.row, fault.column, fault.reason) for fault in left.skipped] == [
        (1, "clip", "'b.mp4' is damaged")
    ]


def test_only_files_that_the_run_reads_are_decoded(tmp_path: Path) -> None:
    noise = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    )
    for name in "ab":
        noise.save(tmp_path / f"{name}.png")
    damage(tmp_path / "b.png")
    (tmp_path / "metadata.csv").write_text("image,mask\na.png,b.png\n")
    inputs = {name: Column(name, "image") for name in ("image", "mask")}
    data = DataConfig(
        tmp_path, None, None, Resolution(None, None, 2**20), on_bad_sample="skip"
    )
    dataset = open_dataset(data, inputs)
    assert (
        len(skip_undecodable(dataset, lambda inputs: inputs - {"mask"}, tmp_path).rows)
        == 1
    )
    with pytest.raises(UsageError, match=r"metadata\.csv:2:mask"):
        skip_undecodable(dataset, lambda inputs: inputs, tmp_path)
