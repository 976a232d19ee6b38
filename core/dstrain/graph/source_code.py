"""Read the source of modules as syntax, without what changes no value: docstrings, comments
and formatting.
"""

import ast
import importlib.util
import linecache
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType
from typing import Any

UNCOUNTED = frozenset({"ctx", "kind", "simple", "type_comment"})
"""Fields of syntax that follow from the others, or change nothing."""
DYNAMIC = frozenset(
    {"__import__", "eval", "exec", "globals", "sys.modules"}
    | {
        ".__doc__",
        ".import_module",
        ".resolve_name",
        ".run_module",
        ".run_path",
        ".exec_module",
    }
)
"""What reaches code by a text, which syntax does not show."""


class NoSource(Exception):
    """There is no source that is surely that of the code; says why."""


@dataclass(frozen=True)
class SourceCode:
    """The source of a module."""

    tree: ast.Module
    codes: list[CodeType]
    """All code that it compiles to."""
    dynamic: list[str]
    """What it uses to reach code by a text."""
    package: str
    """What its relative imports begin at."""


def read_source(module: str) -> SourceCode:
    """Return the source of a module; raise NoSource if there is none, or if it is not that
    of the code that runs.
    """
    here = vars(sys.modules[module]) if module in sys.modules else {}
    spec = here.get("__spec__")
    with suppress(Exception):  # it imports the package, which may raise anything
        spec = spec or importlib.util.find_spec(module)
    file = here.get("__file__") or getattr(spec, "origin", None)
    # linecache also finds sources in zip files; this forgets what has changed on disk.
    linecache.checkcache(file)
    text = "".join(linecache.getlines(str(file), here or None))
    is_namespace = file is None and getattr(spec, "submodule_search_locations", None)
    if not text and not is_namespace and not _is_empty(str(file)):
        raise NoSource("no Python source")
    tree, codes, dynamic = _parsed(text)
    # Others, such as pytest's, compile something else.
    if isinstance(getattr(spec, "loader", None), SourceFileLoader):
        for name, one in here.items():
            # A file may be edited while the code that was read from it is running;
            # torch.compile adds functions.
            if (
                isinstance(one, FunctionType)
                and not name.startswith("__resume_at_")
                and one.__code__.co_filename == file
                and one.__code__ not in codes
            ):
                raise NoSource("another source on disk than the code that runs")
    return SourceCode(tree, codes, dynamic, getattr(spec, "parent", None) or "")


def as_json(node: Any) -> Any:
    """Return syntax as JSON data.

    Not `ast.dump`, which writes other text in other versions of Python.
    """
    if isinstance(node, ast.Constant):
        return literal(node.value)
    if isinstance(node, list):
        return [as_json(one) for one in node]
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {}
    for name, content in ast.iter_fields(node):
        if name not in UNCOUNTED and content is not None and content != []:
            fields[name] = as_json(content)
    return [type(node).__name__, fields]


def literal(value: Any) -> Any:
    """Return a literal as JSON data: its kind and its text."""
    # Not str(): Python refuses to write integers of more than 4,300 digits in decimal.
    text = hex(value) if type(value) is int else ascii(value)
    return [type(value).__name__, text]


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yield what imports in syntax give, and texts of the form "module:Name": module and
    name, '' for the module itself.
    """
    for one in ast.walk(tree):
        if isinstance(one, ast.Import):
            for alias in one.names:
                # `import a.b` binds a.
                yield alias.name if alias.asname else alias.name.partition(".")[0], ""
        elif isinstance(one, ast.ImportFrom):
            above = package.split(".")[: 1 - one.level or None] if one.level else []
            module = ".".join([*above, *filter(None, [one.module])])
            yield from ((module, alias.name) for alias in one.names)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            module, _, name = one.value.partition(":")
            if name.isidentifier():
                yield module, name


def _is_empty(file: str) -> bool:
    return file.endswith(".py") and os.path.isfile(file)


@lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[ast.Module, list[CodeType], list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            codes = [compile(text, "<source>", "exec", dont_inherit=True)]
        except (SyntaxError, ValueError) as error:
            raise NoSource(f"source that cannot be parsed: {error}") from error
        tree = _Counted().visit(ast.parse(text))
    for code in codes:
        # The list grows while it is read.
        codes.extend(one for one in code.co_consts if isinstance(one, CodeType))
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used |= {f".{node.attr}", ast.unparse(node)}
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                used |= {f".{one.name}", f"{node.module}.{one.name}"}
    return tree, codes, sorted(one.lstrip(".") for one in used & DYNAMIC)


class _Counted(ast.NodeTransformer):
    """Remove docstrings from syntax."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant)
        return None if is_text else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        # Some versions of Python add empty texts.
        node.values = [one for one in node.values if getattr(one, "value", 1) != ""]
        return self.generic_visit(node)
