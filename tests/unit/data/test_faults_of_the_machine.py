"""A fault of the machine is never taken for a bad row."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import OutOfMemory, SystemFault
from dstrain.data import load_cell, load_image, probe, read_frames, read_size
from dstrain.plugin import Column
from PIL import Image

from tests.support.datasets import open_rows
from tests.support.machines import no_more_files
from tests.support.noise_images import noise_image
from tests.support.unreadable import make_unreadable

IMAGE = {"image": Column("image", "image", multiple=8)}
ROWS = [{"image": f"{number}.png"} for number in range(2)]
READERS: dict[str, Callable[[Path], object]] = {
    "its size": read_size,
    "its pixels": lambda path: load_image(path, "RGB", None),
    "its frames": probe,
    "a frame": lambda path: read_frames(path, [0], None),
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The first image of two."""
    for row in ROWS:
        noise_image(16, 16).save(tmp_path / row["image"])
    return tmp_path / "0.png"


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_the_machine_cannot_open_is_no_bad_one(
    reader: str, image: Path
) -> None:
    READERS[reader](image)
    with no_more_files(), pytest.raises(SystemFault) as caught:
        READERS[reader](image)
    assert caught.value.where == str(image)


@pytest.mark.parametrize(
    "name",
    [
        *("EMFILE", "ENFILE", "ENOMEM", "EIO", "ESTALE", "EACCES", "ENODEV", "ENXIO"),
        *("ETIMEDOUT", "EHOSTDOWN", "ENOTCONN", "EREMOTEIO", "ENOSPC"),
    ],
)
def test_no_row_is_skipped_for_a_fault_of_the_machine(
    name: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row, _) = open_rows(image.parent, ROWS, IMAGE, on_bad_sample="skip").rows
    make_unreadable(monkeypatch, image, getattr(errno, name))
    with pytest.raises(SystemFault):
        load_cell(row["image"])
    with pytest.raises(SystemFault):
        open_rows(image.parent, ROWS, IMAGE, on_bad_sample="skip")


@pytest.mark.parametrize("name", ["ENOENT", "EISDIR", "ENAMETOOLONG", "EINVAL"])
def test_what_is_wrong_with_a_file_or_its_name_stays_the_files(
    name: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unreadable(monkeypatch, image, getattr(errno, name))
    data = open_rows(image.parent, ROWS, IMAGE, on_bad_sample="skip")
    assert [fault.row for fault in data.skipped] == [0]


def test_an_image_for_which_there_is_no_memory_is_no_bad_image(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(OutOfMemory, match="--dataset_num_workers"):
        read_size(image)
