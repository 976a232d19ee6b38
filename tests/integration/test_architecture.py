"""docs/development/architecture.md describes the packages as they are."""

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


def test_the_terms_are_few() -> None:
    rows = [line for line in TERMS.splitlines() if line.startswith("| ")]
    assert len(rows) - 1 <= MOST_TERMS
