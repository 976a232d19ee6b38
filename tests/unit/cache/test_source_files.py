"""Files of a plan are compared with what is on disk as `first_changed` compares them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain.cache import SourceFiles, source_files, stored_plans
from dstrain.cache.plan_files import write_plan
from dstrain.cache.source_files import frame_folders, marks_of
from dstrain.storage import file_mark, sha256

from tests.support.plan_facts import IDENTITY, about
from tests.support.plan_lines import plan_line

ROWS = 5


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for row in range(ROWS):
        (folder / f"{row}.png").write_bytes(b"image %d" % row)
    return folder


def recorded(data: Path, *names: str) -> SourceFiles:
    """The files of a plan, as they are in the folder."""
    plans = data.parent / "plans"
    plans.mkdir()
    lines = [
        plan_line(row, {}, files=[(name, [*file_mark(path), sha256(path)])])
        for row, name in enumerate(names or [f"{row}.png" for row in range(ROWS)])
        for path in [data / name]
    ]
    write_plan(plans, dict(IDENTITY), about(), lines)
    ((_, record),) = stored_plans(plans)
    return SourceFiles.open(plans, record)


def test_the_mark_of_a_file_is_the_recorded_one(data: Path) -> None:
    assert marks_of([bytes(data / "1.png")]).tolist() == [file_mark(data / "1.png")]
    assert (marks_of([bytes(data), bytes(data / "none"), b"a\0b"]) == -1).all()
    names = [b"none", b"0.png", b"", b"a\0b", b"../data/1.png", b"also none", b"2.png"]
    for root in (bytes(data) + b"/", bytes(data / "link") + b"/"):
        (data / "link").unlink(missing_ok=True)
        (data / "link").symlink_to(data)
        found = marks_of(names, root).tolist()
        none = [-1] * 4
        marks = [file_mark(data / f"{number}.png") for number in range(3)]
        assert found == [none, marks[0], none, none, marks[1], none, marks[2]]
    assert (marks_of([b"0.png"], bytes(data / "no folder") + b"/") == -1).all()


def rewritten(path: Path) -> None:
    path.write_bytes(b"other 3")


def kept_its_time(path: Path) -> None:
    times = path.stat()
    path.write_bytes(b"other 3")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def longer(path: Path) -> None:
    path.write_bytes(b"a longer image")


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def copied(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def removed(path: Path) -> None:
    path.unlink()


CHANGES: tuple[tuple[Callable[[Path], Any], bool], ...] = (
    (rewritten, True),
    (kept_its_time, True),
    (longer, True),
    (touched, False),
    (copied, False),
    (removed, False),
)
"""A change of a file, and whether its content is another one then."""


@pytest.mark.parametrize(("change", "is_other"), CHANGES)
@pytest.mark.parametrize("slow", [0.0, 1.0])
def test_changes_are_found(
    data: Path, monkeypatch: Any, change: Any, is_other: bool, slow: float
) -> None:
    monkeypatch.setattr(source_files, "FILES_AT_ONCE", 2)
    monkeypatch.setattr(source_files, "SLOW", slow)
    files = recorded(data)
    assert files.are_as_recorded([str(data)])
    assert files.first_changed([str(data)]) is None
    change(data / "3.png")
    assert not files.are_as_recorded([str(data)])
    changed = files.first_changed([str(data)])
    assert changed == (str(data / "3.png") if is_other else None)


def test_the_first_folder_with_a_name_has_the_file(data: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    files = recorded(data)
    folders = [str(first), str(data)]
    assert files.are_as_recorded(folders)
    shutil.copy2(data / "1.png", first)
    assert not files.are_as_recorded(folders)
    assert files.first_changed(folders) is None
    (first / "1.png").write_bytes(b"image 9")
    assert files.first_changed(folders) == str(first / "1.png")


def test_a_name_that_leads_out_of_the_folders_is_passed_over(data: Path) -> None:
    files = recorded(data, "../data/2.png", str(data / "3.png"))
    for row in range(ROWS):
        rewritten(data / f"{row}.png")
    assert files.first_changed([str(data)]) is None
    assert not files.are_as_recorded([str(data)])


def test_frame_folders_come_back(tmp_path: Path) -> None:
    line = plan_line(0, {}, folders=[("clip", "ab" * 20)])
    write_plan(tmp_path, dict(IDENTITY), about(), [line])
    ((_, record),) = stored_plans(tmp_path)
    assert list(frame_folders(tmp_path, record)) == [("clip", "ab" * 20)]
    assert not len(SourceFiles.open(tmp_path, record))
    assert np.shape(SourceFiles.open(tmp_path, record).marks(slice(0, 0))) == (0, 4)
