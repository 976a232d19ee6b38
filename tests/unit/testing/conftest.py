"""A place where families are installed for one test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from dstrain.registry import load_family
from dstrain.testing.family_under_test import FamilyUnderTest

from tests.support.kit import install_family


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path for families that are installed for one test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder


@pytest.fixture
def fine(site: Path, tmp_path: Path) -> FamilyUnderTest:
    """The template's family, installed under the name `fine`."""
    install_family("fine", site)
    return FamilyUnderTest(load_family("fine"), "base", tmp_path / "fine_toy")
