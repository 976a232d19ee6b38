"""Rules over all source files of core and plugins; each rule's checker is proved on a
planted example.
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

PICKLES = frozenset(
    {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
)
MUTABLE_CALLS = frozenset(
    {
        "list",
        "dict",
        "set",
        "bytearray",
        "defaultdict",
        "deque",
        "OrderedDict",
        "Counter",
    }
)
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
FAMILIES = re.compile(r"(?i:qwen)|(?<![A-Za-z])(?:flux|Flux|FLUX|wan|Wan|WAN)(?![a-z])")
Checker = Callable[[str], Iterator[str]]


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Each file is parsed once, and its tree kept for the tests here alone."""
    yield
    parsed.cache_clear()


def pickles(source: str) -> Iterator[str]:
    """Imports of modules that run code when they read data."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
        yield from (
            f"{node.lineno}: imports {name}"
            for name in names
            if name.partition(".")[0] in PICKLES
        )


def running_of_data(source: str) -> Iterator[str]:
    """Calls that run what they read: eval, exec, yaml.load, unsafe loading, code that
    comes with a model.
    """
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in (
            "eval",
            "exec",
            "builtins.eval",
            "builtins.exec",
            "yaml.load",
            "pickle.load",
            "pickle.loads",
        ):
            yield f"{node.lineno}: calls {name}"
        for keyword in node.keywords:
            value = (
                keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            )
            if (keyword.arg, value) in (
                ("weights_only", False),
                ("trust_remote_code", True),
            ):
                yield f"{node.lineno}: {keyword.arg}={value}"


def star_imports(source: str) -> Iterator[str]:
    """`from x import *`."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and any(
            alias.name == "*" for alias in node.names
        ):
            yield f"{node.lineno}: from {node.module} import *"


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


def missing_annotations(source: str) -> Iterator[str]:
    """Functions whose return or one of whose parameters has no annotation."""
    for node in _functions(source):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        starred = [
            argument for argument in (arguments.vararg, arguments.kwarg) if argument
        ]
        bare = [
            a.arg
            for a in (*named, *starred)
            if a.annotation is None and a.arg not in ("self", "cls")
        ]
        if bare or node.returns is None:
            yield f"{node.lineno}: {node.name}: {', '.join(bare) or 'return'}"


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
    families = ("flux", "qwen_image", "wan")
    known = [
        one for name in families for one in components_of(load_family(name)).values()
    ]
    return frozenset(
        layer for one in known for layer in (*one.modulation, *one.as_loaded)
    )


def _functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def listed(*folders: str) -> tuple[Path, ...]:
    """Python files of these folders that git tracks or would track, tests and templates
    left out.
    """
    command = [
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *folders,
    ]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = (ROOT / name for name in sorted(set(names)) if name.endswith(".py"))
    return tuple(
        p
        for p in paths
        if p.is_file() and not {"tests", "template"} & set(p.relative_to(ROOT).parts)
    )


EVERYWHERE = (
    pickles,
    running_of_data,
    star_imports,
    missing_annotations,
)
PLANTED: tuple[tuple[Checker, str], ...] = (
    (pickles, "import pickle"),
    (pickles, "def f() -> None:\n    from pickle import load"),
    (pickles, "import json, marshal"),
    (running_of_data, "import torch\ntorch.load('a', weights_only=False)"),
    (running_of_data, "x = eval('1')"),
    (running_of_data, "def f(text: str) -> None:\n    exec(text)"),
    (running_of_data, "import yaml\nyaml.load(open('a'))"),
    (running_of_data, "load('a', trust_remote_code=True)"),
    (star_imports, "from os import *"),
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
    (missing_annotations, "def f(a) -> None: ..."),
    (missing_annotations, "def f(a: int): ..."),
    (missing_annotations, "class A:\n    def f(self, *b) -> None: ..."),
    (missing_annotations, "async def f(*, a) -> None: ..."),
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
    (*EVERYWHERE, mutable_state, changed_tables, family_names, family_layers),
    ids=lambda checker: checker.__name__,
)
def test_innocent_code_is_left_alone(checker: Checker) -> None:
    assert not list(checker(INNOCENT))


@pytest.mark.parametrize("checker", EVERYWHERE, ids=lambda checker: checker.__name__)
def test_no_source_file_breaks_the_rule(checker: Checker) -> None:
    assert not _breaches(checker, listed("core", "plugins"))


def test_neither_core_nor_a_family_has_state_at_module_level() -> None:
    assert not _breaches(mutable_state, listed("core"))
    assert not _breaches(changed_tables, listed("plugins"))
    assert not list(changed_tables("TABLE = {'a': 1}"))


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
