"""Files of a plan are compared with what is on disk."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dstrain.cache import FeatureCache, SourceFiles, source_files
from dstrain.storage import file_mark, sha256

from tests.support.caching_project import change_keeping_times
from tests.support.plan_facts import IDENTITY, about
from tests.support.plan_lines import plan_line

ROWS = 600
"""More than are looked at together."""
CHANGED = "550.png"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for row in range(ROWS):
        (folder / f"{row}.png").write_bytes(b"image %04d" % row)
    return folder


@pytest.fixture
def data(images: Path, tmp_path: Path) -> Path:
    """Files that may be changed."""
    return shutil.copytree(images, tmp_path / "data")


def recorded(data: Path, *names: str) -> SourceFiles:
    """The files of a plan, as they are in the folder."""
    cache = data.parent / "cache"
    FeatureCache.create(cache)
    lines = [
        plan_line(row, {}, files=[(name, [*file_mark(path), sha256(path)])])
        for row, name in enumerate(names or [f"{row}.png" for row in range(ROWS)])
        for path in [data / name]
    ]
    plans = FeatureCache.open(cache)
    plans.write_plan(dict(IDENTITY), about(), lines)
    ((_, record),) = plans.plans()
    return SourceFiles.open(cache / "plans", record)


def rewrite(path: Path) -> None:
    path.write_bytes(b"other 0550")


def copy(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def replace(path: Path) -> None:
    """Put another file of the same time, and of another size, in its place."""
    new = path.with_suffix(".new")
    new.write_bytes(b"a longer image")
    shutil.copystat(path, new)
    new.replace(path)


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "rewritten": (rewrite, True),
    "its time kept": (
        lambda one: change_keeping_times(one, lambda: rewrite(one)),
        True,
    ),
    "longer": (lambda path: path.write_bytes(b"a longer image"), True),
    "replaced": (replace, True),
    "touched": (lambda path: os.utime(path, ns=(1, 1)), False),
    "copied": (copy, False),
    "removed": (Path.unlink, False),
}
"""Changes of a file, and whether its content is another one then."""


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_found(
    data: Path, monkeypatch: pytest.MonkeyPatch, change: str, is_remote: bool
) -> None:
    if is_remote:  # each look at a file takes long, so that many are asked at once
        monkeypatch.setattr(source_files, "SLOW", 0.0)
    files = recorded(data)
    (data.parent / "link").symlink_to(data)
    for folder in (data, data.parent / "link"):
        assert files.are_as_recorded([str(folder)])
        assert files.first_changed([str(folder)]) is None
    do, is_other = CHANGES[change]
    do(data / CHANGED)
    assert not files.are_as_recorded([str(data)])
    changed = files.first_changed([str(data)])
    assert changed == (str(data / CHANGED) if is_other else None)


def test_those_of_some_samples_are_compared_alone(data: Path) -> None:
    files = recorded(data)
    assert len(files) == ROWS
    some = files.of_samples(range(100, 200))
    assert len(some) == 100
    marks = [file_mark(data / f"{row}.png") for row in (101, 102)]
    assert some.marks(slice(1, 3)).tolist() == marks
    assert np.shape(some.marks(slice(0, 0))) == (0, 4)
    rewrite(data / CHANGED)
    assert some.are_as_recorded([str(data)])


def test_the_first_folder_with_a_name_has_the_file(data: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    files = recorded(data)
    folders = [str(first), str(data)]
    assert files.are_as_recorded(folders)
    assert files.are_as_recorded([str(tmp_path / "none"), *folders])
    shutil.copy2(data / "1.png", first)
    assert not files.are_as_recorded(folders)
    assert files.first_changed(folders) is None
    (first / "1.png").write_bytes(b"image 0009")
    assert files.first_changed(folders) == str(first / "1.png")
    (first / "1.png").unlink()
    rewrite(data / CHANGED)
    assert files.first_changed(folders) == str(data / CHANGED)
