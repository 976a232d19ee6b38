"""A fault of the machine is never taken for a bad row."""

import errno
from pathlib import Path
from typing import Any

import pytest
from dstrain import OutOfMemory
from dstrain.data import read_size
from dstrain.plugin import Column
from PIL import Image

from tests.support.datasets import open_rows
from tests.support.noise_images import noise_image
from tests.support.unreadable import make_unreadable

IMAGE = {"image": Column("image", "image", multiple=8)}
ROWS = [{"image": f"{number}.png"} for number in range(2)]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The first image of two."""
    for row in ROWS:
        noise_image(16, 16).save(tmp_path / row["image"])
    return tmp_path / "0.png"


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
