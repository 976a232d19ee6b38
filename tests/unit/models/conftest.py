"""A model and a project that each test has for itself, to change them."""

from pathlib import Path

import pytest

from tests.support.family import write
from tests.support.runs import project_by_id


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files of a model of the family `tiny`."""
    write(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose model is published by id; the working directory."""
    return project_by_id(tmp_path, monkeypatch)
