"""A feature cache with two plans, of which some values are shared."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.caching_project import Place, filled_place


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Four rows, of which the last two have one prompt; tests leave it as it is."""
    with filled_place(tmp_path_factory.mktemp("shared")) as place:
        yield place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """The same, for one test."""
    with filled_place(tmp_path) as place:
        yield place
