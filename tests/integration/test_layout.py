"""The folders show the architecture: layers hold."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

CORE = ROOT / "core/dstrain"


def lint(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run import-linter over the library that lies in a folder."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [*command, "--config", str(ROOT / "pyproject.toml")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of the library; returns the folder that holds the package."""
    shutil.copytree(
        CORE, tmp_path / "dstrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def plant(path: Path, line: str) -> None:
    """Add a line to a module, behind its docstring."""
    source = path.read_text()
    first = ast.parse(source).body[0]
    lines = source.splitlines(keepends=True)
    lines.insert(first.end_lineno or 0, line + "\n")
    path.write_text("".join(lines))


def test_the_library_keeps_its_layers(library: Path) -> None:
    done = lint(library)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "from dstrain.runs.setup import Setup",
        "if TYPE_CHECKING:\n    from dstrain.runs.setup import Setup",
        "def late() -> None:\n    from dstrain.runs.setup import Setup",
    ],
    ids=["at the top", "for types", "inside a function"],
)
def test_an_import_from_a_lower_layer_of_a_higher_one_fails(
    library: Path, line: str
) -> None:
    plant(library / "dstrain/graph/unit.py", line)
    done = lint(library)
    assert done.returncode == 1
    assert "dstrain.graph is not allowed to import dstrain.runs" in done.stdout


def test_a_circle_within_a_package_fails(library: Path) -> None:
    plant(library / "dstrain/graph/unit.py", "from dstrain.graph.plan import Plan")
    done = lint(library)
    assert done.returncode == 1
    assert "no circle of modules within a package BROKEN" in done.stdout


def test_unit_tests_are_in_folders_named_as_packages() -> None:
    """A merge runs those of what has changed first, and finds them so."""
    packages = {path.relative_to(CORE).parent for path in CORE.rglob("*.py")}
    folders = {
        path.relative_to(ROOT / "tests/unit").parent
        for path in (ROOT / "tests/unit").rglob("test_*.py")
    }
    assert folders <= packages
