"""Read the syntax of modules, without docstrings, comments and formatting."""

import ast
import importlib.util
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

UNCOUNTED = frozenset({"ctx", "kind", "simple", "type_comment"})
"""Fields of syntax that follow from the others, or change nothing."""
DYNAMIC = frozenset(
    {"__import__", "eval", "exec", "globals", "sys.modules"}
    | {".__doc__", ".import_module", ".resolve_name", ".exec_module"}
    | {".run_module", ".run_path"}
)
"""What reaches code by a text, which syntax does not show."""


class NoSource(Exception):
    """There is no source that is surely that of the code; says why."""


@dataclass(frozen=True)
class Source:
    """The source of a module."""

    tree: ast.Module
    dynamic: list[str]
    """What it uses to reach code by a text."""
    package: str
    """What its relative imports begin at."""


def read_source(module: str) -> Source:
    """Return the source of a module; raise NoSource if there is none, or if it is not that
    of the code that runs.
    """
    here = vars(sys.modules[module]) if module in sys.modules else {}
    spec = here.get("__spec__") or find_module(module)
    file = here.get("__file__")
    loader = getattr(spec, "loader", None)
    # A script has no loader, and others, such as pytest's, compile something else.
    read = getattr(loader, "get_source", lambda _: Path(str(file)).read_text("utf-8"))
    text = None
    with suppress(OSError, ImportError, SyntaxError, ValueError):
        text = read(module)
    if text is None:
        raise NoSource("no Python source")
    tree, codes, dynamic = _parsed(text)
    if isinstance(loader, SourceFileLoader):
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
    return Source(tree, dynamic, getattr(spec, "parent", None) or "")


@lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[ast.Module, list[CodeType], list[str]]:
    """Return the syntax of a text, all code that it compiles to, and what of DYNAMIC it
    uses.
    """
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


def as_json(node: Any) -> Any:
    """Return syntax as JSON data.

    Not `ast.dump`, which writes other text in other versions of Python.
    """
    if isinstance(node, ast.Constant):
        value = node.value
        # Not str(): Python refuses to write integers of more than 4,300 digits in decimal.
        text = hex(value) if type(value) is int else ascii(value)
        return [type(value).__name__, text]
    if isinstance(node, list):
        return [as_json(one) for one in node]
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {}
    for name, content in ast.iter_fields(node):
        if name not in UNCOUNTED and content is not None and content != []:
            fields[name] = as_json(content)
    return [type(node).__name__, fields]


def find_module(module: str) -> Any:
    """Return where Python finds a module; None for what is no module."""
    with suppress(Exception):  # it imports the package, which may raise anything
        return importlib.util.find_spec(module)
    return None
