"""The names in a package's stub load on first use, and no others exist."""

import sys
from pathlib import Path

import pytest
from dstrain.lazy import attach


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of a package whose stub names two things."""
    (tmp_path / "lazy_numbers.py").write_text("ONE = 1\nTWO = 2\n")
    (tmp_path / "__init__.pyi").write_text(
        "from lazy_numbers import TWO as TWO\nfrom lazy_numbers import ONE as ONE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lazy_numbers", raising=False)
    return str(tmp_path / "__init__.py")


def test_names_are_listed_without_importing_them(package: str) -> None:
    _, listed, names = attach("numbers", package)
    assert listed() == names == ["ONE", "TWO"]
    assert "lazy_numbers" not in sys.modules


def test_a_name_is_imported_when_it_is_used(package: str) -> None:
    load, _, _ = attach("numbers", package)
    assert load("TWO") == 2
    assert "lazy_numbers" in sys.modules


def test_a_name_that_is_not_in_the_stub_is_no_attribute(package: str) -> None:
    load, _, _ = attach("numbers", package)
    with pytest.raises(AttributeError, match="'numbers' has no attribute 'THREE'"):
        load("THREE")
