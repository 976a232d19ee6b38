"""A project that runs read and do not change."""

from pathlib import Path

import pytest

from tests.support.runs import warm_project


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without dropout."""
    return warm_project(tmp_path_factory.mktemp("project"))
