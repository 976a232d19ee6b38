"""The names in a package's stub load on first use; quantizing libraries stay usable."""

import subprocess
import sys
from pathlib import Path

import pytest
from dstrain.lazy import attach
from dstrain.models import write_toy
from dstrain.registry import load_family


def test_names_are_listed_without_importing_them_until_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_numbers.py").write_text("ONE = 1\nTWO = 2\n")
    stub = "from lazy_numbers import TWO as TWO\nfrom lazy_numbers import ONE as ONE\n"
    (tmp_path / "__init__.pyi").write_text(stub)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lazy_numbers", raising=False)
    load, listed, names = attach("numbers", str(tmp_path / "__init__.py"))
    assert listed() == names == ["ONE", "TWO"]
    assert "lazy_numbers" not in sys.modules
    assert load("TWO") == 2
    with pytest.raises(AttributeError, match=r"'numbers'.*'THREE'"):
        load("THREE")


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy whose networks are those of diffusers."""
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_toy(load_family("qwen_image"), "base", folder)
    return folder


@pytest.mark.parametrize("code", [QUANTIZE + LOAD, LOAD + QUANTIZE])
def test_diffusers_quantizes_beside_a_loaded_model(model: Path, code: str) -> None:
    command = (sys.executable, "-c", code, str(model))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True"]
    # What libraries say as they are imported, the script's own import shows alone.
    assert not done.stderr or code.startswith(QUANTIZE)
