"""Compute digests of the code that a function depends on: of its module, and of the modules
of its own top-level package that this imports, transitively.

A module counts by its syntax, without docstrings, comments and formatting. A package's
`__init__` counts only if a name is taken from it; one that is imported as an object counts
with all its modules. Of dstrain, the functions that families share count.
"""

import ast
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from dstrain.errors import UsageError
from dstrain.storage import hash_json

CODE = "code of "
"""What the facts about modules begin with."""
SHARED = "dstrain.models.functional"
"""The functions of dstrain that families share."""
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
class Code:
    """What a function depends on."""

    facts: Mapping[str, str]
    """"code of MODULE" -> the digest of its syntax; "holds" -> that of the function's name."""
    unknown: tuple[str, ...]
    """What cannot be taken into account, with the reason."""

    @property
    def digest(self) -> str:
        """Return one digest of it all."""
        return hash_json("code", dict(self.facts))


def code_of(function: Callable[..., Any]) -> Code:
    """Return what a function, or a class, depends on.

    It is the same in every process, on every machine and with every version of Python
    that reads the same syntax. What a call makes, such as a closure or a partial, is
    unknown: its values stand in no syntax that is surely here.
    """
    module = module_of(function)
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    made = () if found is function else (f"{module}.{name} is made by a call",)
    named = [module.partition("._")[0], name]
    held = named if isinstance(function, type) else [named, 0]
    code = code_of_module(module)
    facts = {"holds": hash_json("held", held), **code.facts}
    return Code(facts, (*made, *code.unknown))


def code_of_module(module: str) -> Code:
    """Return what a module depends on: itself, and what it imports of its package."""
    package = module.partition(".")[0]
    digests: dict[str, str] = {}
    unknown: list[str] = []
    left = [(SHARED, False), (module, False)]
    while left:
        name, is_whole = left.pop()
        if name.partition(".")[0] != package and name != SHARED:
            continue
        if is_whole:
            left += ((one, False) for one in _modules_in(name))
        if name in digests:
            continue
        digests[name] = ""
        try:
            source = _read_source(name)
        except NoSource as reason:
            unknown.append(f"{name} has {reason}")
            continue
        digests[name] = hash_json("module", _as_json(source.tree))
        unknown += (f"{name} uses {one}" for one in source.dynamic)
        left += _imported(source, package)
    facts = {f"{CODE}{name}": digests[name] for name in sorted(digests)}
    return Code(facts, tuple(unknown))


def facts_of(code: Code, where: str, declare: str) -> Mapping[str, str]:
    """Return the facts of code that can be followed; raise UsageError for other code.

    declare: How a version is declared instead.
    """
    if code.unknown:
        more = f", and {len(code.unknown) - 1} more" if code.unknown[1:] else ""
        raise UsageError(
            where,
            f"needs a version: {code.unknown[0]}{more}",
            f"{declare}, and raise the number when it does something else",
        )
    return code.facts


def module_of(function: Callable[..., Any]) -> str:
    """Return the name of the module of a function, or of the one that a partial calls."""
    while isinstance(function, partial):
        function = function.func
    return function.__module__ or ""


@dataclass(frozen=True)
class _Source:
    """The source of a module."""

    tree: ast.Module
    dynamic: list[str]
    """What it uses to reach code by a text."""
    package: str
    """What its relative imports begin at."""


def _read_source(module: str) -> _Source:
    """Return the source of a module; raise NoSource if there is none, or if it is not that
    of the code that runs.
    """
    here = vars(sys.modules[module]) if module in sys.modules else {}
    spec = here.get("__spec__") or _find(module)
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
    return _Source(tree, dynamic, getattr(spec, "parent", None) or "")


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


def _as_json(node: Any) -> Any:
    """Return syntax as JSON data.

    Not `ast.dump`, which writes other text in other versions of Python.
    """
    if isinstance(node, ast.Constant):
        value = node.value
        # Not str(): Python refuses to write integers of more than 4,300 digits in decimal.
        text = hex(value) if type(value) is int else ascii(value)
        return [type(value).__name__, text]
    if isinstance(node, list):
        return [_as_json(one) for one in node]
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {}
    for name, content in ast.iter_fields(node):
        if name not in UNCOUNTED and content is not None and content != []:
            fields[name] = _as_json(content)
    return [type(node).__name__, fields]


def _imported(source: _Source, package: str) -> Iterator[tuple[str, bool]]:
    """Yield the modules of a package that a source imports, each with whether it is
    imported as an object.
    """
    for name, taken in _imports(source.tree, source.package):
        if name.partition(".")[0] == package or name == SHARED:
            inner = f"{name}.{taken}".rstrip(".")
            is_module = bool(_find(inner))
            if is_module:
                yield inner, True
            # A package may give another thing by the name of one of its modules.
            if not is_module or _names_in(name) & {taken, "*", "__getattr__"}:
                yield name, False


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
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


def _find(module: str) -> Any:
    """Return where Python finds a module; None for what is no module."""
    with suppress(Exception):  # it imports the package, which may raise anything
        return importlib.util.find_spec(module)
    return None


def _names_in(module: str) -> set[str]:
    """Return the names that occur in a module: those that it may give are among them."""
    with suppress(NoSource):
        nodes = [*ast.walk(_read_source(module).tree)]
        fields = ("asname", "id", "name")
        return {getattr(one, field, "") for one in nodes for field in fields}
    return set()


def _modules_in(package: str) -> Iterator[str]:
    """Yield the modules in a package and in those in it."""
    folders = getattr(_find(package), "submodule_search_locations", None)
    for info in pkgutil.iter_modules(folders or (), f"{package}."):
        yield info.name
        yield from _modules_in(info.name)
