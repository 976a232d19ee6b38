"""Read the source of code that runs as syntax, without what changes no value:
docstrings, comments, annotations and formatting.
"""

import ast
import linecache
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
UNCOUNTED = frozenset({"ctx", "kind", "simple", "type_comment"})
"""Fields of syntax that follow from the others, or change nothing."""


class NoSource(Exception):
    """There is no source that is surely that of the code; says why."""


@dataclass(frozen=True)
class SourceCode:
    """The source of a module."""

    tree: ast.Module
    codes: list[CodeType]
    """All code that it compiles to."""
    functions: Mapping[tuple[str, int], list[Any]]
    """The functions by name and first line."""


def source_of(file: str, namespace: Mapping[str, Any]) -> SourceCode:
    """Return the source of a module; raise NoSource if there is none."""
    # linecache also finds sources in zip files and those of notebooks; this forgets what
    # has changed on disk.
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file, dict(namespace)))
    if not text:
        raise NoSource("no Python source")
    return _parsed(text)


def find_function(code: CodeType, namespace: Mapping[str, Any]) -> ast.AST:
    """Return the syntax of a function; raise NoSource if its source is not there, or is
    not what it was compiled from.
    """
    source = source_of(code.co_filename, namespace)
    # A file may be edited while the code that was read from it is running.
    if code not in source.codes:
        raise NoSource("another source on disk than the code that runs")
    found: list[ast.AST] = source.functions[code.co_name, code.co_firstlineno]
    if len(found) > 1:
        raise NoSource("another function of its name in its line")
    return found[0]


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


def names_used(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names in syntax, each with the attribute that follows it, or ''."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield node.value.id, node.attr
    elif isinstance(node, ast.Name):
        yield node.id, ""
    else:
        for one in ast.iter_child_nodes(node):
            yield from names_used(one)


def imports(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yield what imports in syntax give: module and name, '' for the module itself."""
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            yield from ((alias.name, "") for alias in one.names)
        elif isinstance(one, ast.ImportFrom):
            above = package.split(".")[: 1 - one.level or None] if one.level else []
            module = ".".join([*above, *filter(None, [one.module])])
            yield from ((module, alias.name) for alias in one.names)


def names_bound(statement: ast.AST) -> set[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    names = set()
    for one in ast.walk(statement):
        if isinstance(one, ast.alias):
            names.add(one.asname or one.name)
        elif isinstance(one, DEFINITIONS):
            names.add(one.name)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.add(one.id)
    return names


@lru_cache(maxsize=64)
def _parsed(text: str) -> SourceCode:
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
    functions = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            first = [*getattr(node, "decorator_list", []), node][0]
            name = getattr(node, "name", "<lambda>")
            functions[name, first.lineno].append(node)
    return SourceCode(tree, codes, functions)


class _Counted(ast.NodeTransformer):
    """Remove docstrings, `pass` and annotations from syntax."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant)
        return None if is_text else self.generic_visit(node)

    def visit_Pass(self, node: ast.Pass) -> None:
        return None

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        # Some versions of Python add empty texts.
        node.values = [one for one in node.values if getattr(one, "value", 1) != ""]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        plain = ast.Assign([node.target], node.value) if node.value else None
        return plain and self.generic_visit(plain)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # Annotations here may declare fields.
        fields = ast.AnnAssign
        body = [
            one if isinstance(one, fields) else self.visit(one) for one in node.body
        ]
        node.body = list(filter(None, body))
        return node
