"""Rules over all source files of core and plugins that no rule of ruff is; each rule's
checker is proved on a planted example.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from dstrain.models import components_of
from dstrain.registry import load_family

from tests.support import ROOT

MUTABLE_CALLS = frozenset(
    {
        *("list", "dict", "set", "bytearray"),
        *("defaultdict", "deque", "OrderedDict", "Counter"),
    }
)
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
FAMILIES = re.compile(
    r"(?i:qwen|sdxl)|(?<![A-Za-z])(?:flux|Flux|FLUX|wan|Wan|WAN)(?![a-z])"
)
Checker = Callable[[str], Iterator[str]]


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Each file is parsed once, and its tree kept for the tests here alone."""
    yield
    parsed.cache_clear()


def mutable_state(source: str) -> Iterator[str]:
    """Module-level names bound to something that can change."""
    for node in _module_level(parsed(source)):
        value = (
            node.value
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
            else None
        )
        called = (
            isinstance(value, ast.Call)
            and ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
        )
        if isinstance(value, DISPLAYS) or called:
            yield f"{node.lineno}: {ast.unparse(node)[:60]}"


def changed_tables(source: str) -> Iterator[str]:
    """Module-level state of a family, in whose code a table is a plain dictionary.

    A table with entries and a constant's name is none, as long as nothing changes it.
    """
    tree = parsed(source)
    changes = re.compile(
        r"\b([A-Z][A-Z0-9_]*)(\[[^\]]*\] *=[^=]|\.(update|pop|clear|setdefault)\()"
    )
    changed = {match.group(1) for match in changes.finditer(source)}
    for node in _module_level(tree):
        table = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = (
            [node.target]
            if isinstance(node, ast.AnnAssign)
            else getattr(node, "targets", [])
        )
        names = [ast.unparse(target) for target in targets]
        is_constant = all(name.isupper() and name not in changed for name in names)
        has_entries = isinstance(table, ast.DictComp) or bool(
            getattr(table, "keys", [])
        )
        if not (
            isinstance(table, ast.Dict | ast.DictComp) and is_constant and has_entries
        ):
            yield from (
                found
                for found in mutable_state(source)
                if found.startswith(f"{node.lineno}: ")
            )


def _module_level(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield from _module_level(child)


def family_names(source: str) -> Iterator[str]:
    """Core names no family."""
    for number, line in enumerate(source.splitlines(), 1):
        if FAMILIES.search(line):
            yield f"{number}: {line.strip()}"


def family_layers(source: str) -> Iterator[str]:
    """Core names no layer that a family says is special."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Constant) and node.value in special_layers():
            yield f"{node.lineno}: {node.value}"


@cache
def special_layers() -> frozenset[object]:
    families = ("flux", "flux2", "qwen_image", "sdxl", "wan", "z_image")
    known = [
        one for name in families for one in components_of(load_family(name)).values()
    ]
    return frozenset(
        layer for one in known for layer in (*one.modulation, *one.as_loaded)
    )


def listed(*folders: str) -> tuple[Path, ...]:
    """Python files of these folders that git tracks or would track, tests and templates
    left out.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        [*command, "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = (ROOT / name for name in sorted(set(names)) if name.endswith(".py"))
    return tuple(
        p
        for p in paths
        if p.is_file() and not {"tests", "template"} & set(p.relative_to(ROOT).parts)
    )


PLANTED: tuple[tuple[Checker, str], ...] = (
    (mutable_state, "SEEN = []"),
    (mutable_state, "SEEN: dict[str, int] = {}"),
    (mutable_state, "SEEN = {n for n in 'ab'}"),
    (mutable_state, "SEEN = set()"),
    (mutable_state, "import collections\nSEEN = collections.defaultdict(int)"),
    (mutable_state, "if True:\n    SEEN = {'a': 1}"),
    (mutable_state, "__all__ = ['main']"),
    (changed_tables, "SEEN = {}"),
    (changed_tables, "SEEN = [1]"),
    (changed_tables, "seen = {'a': 1}"),
    (changed_tables, "SEEN = {'a': 1}\nSEEN['b'] = 2"),
    (changed_tables, "SEEN = {'a': 1}\nSEEN.update(b=2)"),
    (family_names, "name = 'qwen_image'"),
    (family_names, "# as QwenImage does"),
    (changed_tables, "TABLE: dict[str, int] = {'a': 1}\nTABLE['b'] = 2"),
    (family_names, "import dstrain_flux"),
    (family_names, "'Wan2.1'"),
    (family_layers, "LAYERS = ('a', 'img_mod.1')"),
)
INNOCENT = (
    "import json\nfrom types import MappingProxyType\n__all__ = ('a',)\nTABLE = MappingProxyType({'a': [1]})\n"
    "class A:\n    def f(self, wanted: int) -> dict[str, int]:\n        found = {}\n        self.model.eval()\n"
    "        # influx of what we want\n        torch.load('a', weights_only=True)\n        return found\n"
)


@pytest.mark.parametrize(
    ("checker", "source"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_breach_is_found(checker: Checker, source: str) -> None:
    assert list(checker(source))


@pytest.mark.parametrize(
    "checker",
    (mutable_state, changed_tables, family_names, family_layers),
    ids=lambda checker: checker.__name__,
)
def test_innocent_code_is_left_alone(checker: Checker) -> None:
    assert not list(checker(INNOCENT))


def test_neither_core_nor_a_family_has_state_at_module_level() -> None:
    assert not _breaches(mutable_state, listed("core"))
    assert not _breaches(changed_tables, listed("plugins"))
    assert not list(changed_tables("TABLE = {'a': 1}"))


def test_nothing_that_is_loaded_may_run_code() -> None:
    loose = re.compile("weights_only=False|trust_remote_code=True")
    sources = listed("core", "plugins")
    assert not [path for path in sources if loose.search(path.read_text())]


def test_core_names_no_family_and_no_layer_of_one() -> None:
    assert not _breaches(family_names, listed("core/dstrain"))
    assert not _breaches(family_layers, listed("core/dstrain"))


def test_the_rules_are_applied_to_all_of_core_and_to_the_plugins() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in listed("core", "plugins")}
    assert found == {"core", "plugins"}
    assert ROOT / "core/dstrain/errors.py" in listed("core")


def _breaches(checker: Checker, paths: tuple[Path, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{found}"
        for path in paths
        for found in checker(path.read_text())
    ]


def test_tests_that_need_downloads_can_be_collected() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
