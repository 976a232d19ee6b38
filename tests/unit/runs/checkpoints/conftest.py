"""A project whose runs are saved, resumed and replaced."""

from pathlib import Path

import pytest

from tests.support.runs import project


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six rows and a model; tests leave them as they are."""
    return project(tmp_path_factory.mktemp("project"))
