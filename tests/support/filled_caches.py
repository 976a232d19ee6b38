"""Feature caches of the families `stored` and `tiny`, of which a conftest takes what it needs."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.caching_project import Place, filled_place, write_rows
from tests.support.runs import project, train


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """The same, for one test."""
    with filled_place(tmp_path) as place:
        yield place


@pytest.fixture
def two_plans(place: Place) -> Place:
    """A cache whose second plan, of the dataset as it is, uses some of its values."""
    write_rows(place.data, place.rows[:2])
    place.fill()
    return place


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a filled cache `whole`, which tests leave as it is."""
    folder = project(tmp_path_factory.mktemp("project"))
    train(folder, task="sft:data_process", feature_cache=folder / "whole")
    return folder


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Note a file or a folder, and return it: the test may change or move it."""
    noted: list[tuple[Path, Path]] = []

    def note(path: Path) -> Path:
        copy = tmp_path / f"spare {len(noted)}"
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, copy)
        noted.append((path, copy))
        return path

    yield note
    for path, copy in noted:
        if path.is_dir():
            shutil.rmtree(path)
        copy.rename(path)
