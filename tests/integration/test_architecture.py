"""docs/development/architecture.md describes the packages as they are."""

import ast
import re
import tomllib

from tests.support import ROOT

PAGE = (ROOT / "docs/development/architecture.md").read_text()
TERMS = (ROOT / "docs/development/terms.md").read_text()
CORE = ROOT / "core/dstrain"
MOST_TERMS = 20
TABLE_ROW = re.compile(r"^\| `([\w/.]+)` \|", re.MULTILINE)


def packages() -> set[str]:
    """The packages of the core, and its modules that are in none."""
    folders = {path.parent.name for path in CORE.glob("*/__init__.py")}
    modules = {path.name for path in CORE.glob("*.py")}
    return folders | (modules - {"__init__.py", "__main__.py"})


def test_every_package_is_in_the_table_and_no_other() -> None:
    rows = set(TABLE_ROW.findall(PAGE))
    assert {row for row in rows if "/" not in row} == packages()
    assert all((CORE / row).exists() for row in rows)


def test_every_module_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    in_core = {name for name in named if "/" in name and not name.startswith("tools/")}
    assert len(in_core) > 30
    assert [name for name in sorted(in_core) if not (CORE / name).is_file()] == []


def test_the_layers_drawn_are_those_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    drawn = PAGE.partition("```text\n")[2].partition("```")[0].splitlines()
    assert drawn == layers


def test_no_package_below_runs_is_given_a_train_config() -> None:
    below = (
        "training",
        "pipeline",
        "lora",
        "cache",
        "models",
        "data",
        "graph",
        "storage",
    )
    files = [path for package in below for path in (CORE / package).rglob("*.py")]
    assert len(files) > 50
    assert [path for path in files if "TrainConfig" in path.read_text()] == []


def hidden_imports(source: str) -> list[str]:
    """Imports that import-linter takes for none: of the package as a whole, whose names
    are loaded on use, and of a module by its name in a string.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name == "dstrain"]
        elif isinstance(node, ast.ImportFrom) and node.module == "dstrain":
            found += [f"dstrain.{one.name}" for one in node.names]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found += [
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant)
                and str(argument.value).startswith("dstrain.")
            ]
    return found


def test_no_module_has_an_import_that_the_contract_does_not_see() -> None:
    for hidden in (
        "import dstrain",
        "from dstrain import run",
        "import_module('dstrain.cli')",
    ):
        assert hidden_imports(hidden)
    modules = [path for path in CORE.rglob("*.py") if "template" not in path.parts]
    assert len(modules) > 100
    found = {path.name: hidden_imports(path.read_text()) for path in modules}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_own_terms_are_few() -> None:
    own = TERMS.partition("\n## ")[0]
    rows = [line for line in own.splitlines() if line.startswith("| ")]
    assert len(rows) - 1 <= MOST_TERMS
