"""The names in a package's stub load on first use, and no others exist."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from dstrain import lazy
from dstrain.lazy import attach, import_name


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


def test_a_library_is_imported_without_those_that_quantize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_library.py").write_text(
        "try:\n    import a_quantizer\nexcept ImportError:\n    a_quantizer = None\n"
    )
    (tmp_path / "a_quantizer.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lazy, "QUANTIZERS", ("a_quantizer",))
    assert import_name("large_library", "a_quantizer") is None
    assert "a_quantizer" not in sys.modules
    # A run that quantizes imports it, and then it is there for all.
    ours = import_module("a_quantizer")
    del sys.modules["large_library"]
    assert import_name("large_library", "a_quantizer") is ours
