"""Rows whose files cannot be decoded are found before a run; none is decoded twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain.data import Cell, Dataset, Resolution, decoding, load_cell
from dstrain.data.clips import FrameSampling
from dstrain.data.decoding import skip_undecodable
from dstrain.plugin import Column

from tests.support.bad_files import hurt
from tests.support.clock import settle
from tests.support.datasets import open_rows
from tests.support.noise_images import noise_image
from tests.support.videos import KEYS, film, lose_frame, steady

IMAGE = {"image": Column("image", "image", multiple=8)}


def images(folder: Path, *names: str, **settings: Any) -> Dataset:
    """A dataset of images of noise, one in each row; those that are there stay."""
    for name in names:
        if not (folder / name).exists():
            noise_image(32, 32).save(folder / name)
    rows = [{"image": name} for name in names]
    return open_rows(folder, rows, IMAGE, on_bad_sample="skip", **settings)


def damage(path: Path) -> None:
    """Overwrite bytes in the middle, which neither header nor end show."""
    path.write_bytes(hurt(path.read_bytes()))


def decodable(
    dataset: Dataset,
    folder: Path,
    used: Callable[[frozenset[str]], frozenset[str]] = frozenset,
) -> Dataset:
    """The dataset without rows that name what cannot be decoded."""
    return skip_undecodable(dataset, used, folder)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded."""
    names: list[str] = []

    def load(cell: Cell) -> Any:
        names.extend(Path(file).name for file in cell.files)
        return load_cell(cell)

    monkeypatch.setattr(decoding, "load_cell", load)
    return names


def test_a_damaged_file_leaves_its_rows_out_and_is_decoded_once(
    tmp_path: Path, decoded: list[str]
) -> None:
    dataset = images(tmp_path, "a.png", "b.png", "a.png", "c.png")
    damage(tmp_path / "a.png")
    left = decodable(dataset, tmp_path)
    assert left.sample_ids.tolist() == [[1, 0], [3, 0]]
    skipped = [(one.row, one.column) for one in left.skipped]
    assert skipped == [(0, "image"), (2, "image")]
    assert left.skipped[0].reason.startswith("'a.png' ")
    assert sorted(decoded) == ["a.png", "b.png", "c.png"]


def test_only_what_changed_was_bad_or_is_loaded_in_another_way_is_decoded_again(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    names = ("a.png", "b.png", "c.png")
    images(tmp_path, *names)
    damage(tmp_path / "b.png")
    decodable(images(tmp_path, *names), tmp_path)
    decoded.clear()
    noise_image(32, 32, seed=1).save(tmp_path / "c.png")
    decodable(images(tmp_path, *names), tmp_path)
    assert sorted(decoded) == ["b.png", "c.png"]
    decoded.clear()
    decodable(images(tmp_path, "a.png", resolution=Resolution(16, 16, 1)), tmp_path)
    assert decoded == ["a.png"]


def test_a_row_of_several_clips_is_skipped_whole(tmp_path: Path) -> None:
    for name in "abc":
        film(tmp_path / f"{name}.mp4", steady(25, 15), 15, options=KEYS)
    lose_frame(tmp_path / "b.mp4", 15)
    column = Column("clip", "video", multiple=8, frame_multiple=4, fps=15.0)
    rows = [{"clip": f"{name}.mp4"} for name in "abc"]
    sampling = FrameSampling(9, "chunk")
    dataset = open_rows(
        tmp_path, rows, {"clip": column}, sampling=sampling, on_bad_sample="skip"
    )
    both = [[row, chunk] for row in range(3) for chunk in (0, 1)]
    assert dataset.sample_ids.tolist() == both
    load_cell(dataset.rows[2]["clip"])
    left = decodable(dataset, tmp_path)
    assert left.sample_ids.tolist() == [*both[:2], *both[4:]]
    (fault,) = left.skipped
    assert (fault.row, fault.column) == (1, "clip")
    assert "'b.mp4'" in fault.reason
