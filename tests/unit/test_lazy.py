"""The names in a package's stub load on first use, and no others exist."""

import subprocess
import sys
from contextvars import Context
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from dstrain import lazy
from dstrain.lazy import attach, import_name, own_process
from dstrain.models import write_toy
from dstrain.registry import load_family


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


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library that imports one that quantizes where that is installed, as it is."""
    (tmp_path / "large_library.py").write_text(
        "try:\n    import a_quantizer\nexcept ImportError:\n    a_quantizer = None\n"
    )
    (tmp_path / "a_quantizer.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lazy, "QUANTIZERS", ("a_quantizer",))
    for name in ("a_quantizer", "large_library"):
        monkeypatch.setitem(sys.modules, name, sys)  # removed again after the test
        monkeypatch.delitem(sys.modules, name)
    return "large_library"


def test_a_library_is_imported_without_those_that_quantize(library: str) -> None:
    with own_process():
        assert import_name(library, "a_quantizer") is None
        assert "a_quantizer" not in sys.modules
        # A run that quantizes imports it, and then it is there for all.
        ours = import_module("a_quantizer")
        del sys.modules[library]
        assert import_name(library, "a_quantizer") is ours


def test_a_script_gets_libraries_as_they_are(library: str) -> None:
    # A context of its own is one that no command line has entered.
    found = Context().run(import_name, library, "a_quantizer")
    assert found is sys.modules["a_quantizer"]


@pytest.mark.parametrize("owner", ["diffusers", "transformers"])
def test_what_a_library_has_noted_is_not_hidden_from_it(
    library: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = ModuleType("import_utils")
    is_available = lru_cache(lambda: True)
    is_available()
    noted.__dict__["is_a_quantizer_available"] = is_available
    monkeypatch.setitem(sys.modules, f"{owner}.utils.import_utils", noted)
    with own_process():
        assert import_name(library, "a_quantizer") is sys.modules["a_quantizer"]


LOAD = """
import sys
from dstrain import Pipeline
Pipeline.from_pretrained(sys.argv[1], device="cpu", variant="base")
"""
QUANTIZE = """
import diffusers
print(diffusers.utils.is_bitsandbytes_available(), diffusers.utils.is_torchao_available())
print(diffusers.BitsAndBytesConfig(load_in_4bit=True).load_in_4bit)
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [QUANTIZE + LOAD, LOAD + QUANTIZE])
def test_diffusers_quantizes_before_and_after_a_model_is_loaded(
    tmp_path: Path, code: str
) -> None:
    write_toy(load_family("qwen_image"), "base", tmp_path / "model")
    command = (sys.executable, "-c", code, str(tmp_path / "model"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True"]
