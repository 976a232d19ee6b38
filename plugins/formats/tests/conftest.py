"""Projects that runs read and do not change."""

from pathlib import Path

import pytest

from tests.support.runs import warm_project


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without dropout."""
    return warm_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def dropping(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout."""
    return warm_project(tmp_path_factory.mktemp("dropping"), dropout=0.3)
