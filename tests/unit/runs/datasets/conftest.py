"""A dataset of three rows."""

from pathlib import Path

import pytest

from tests.support.family import write_data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return its folder."""
    write_data(tmp_path / "written", ("dog", "cat", "bird"))
    return tmp_path / "written"
