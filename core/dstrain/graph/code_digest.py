"""Compute digests of the code that a function depends on: of its module, and of the modules
of its own top-level package that this imports, transitively.

A module counts by its syntax, without docstrings, comments and formatting. A package's
`__init__` counts only if a name is taken from it; one that is imported as an object counts
with all its modules. Of dstrain, the functions that families share count.
"""

import ast
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from dstrain.errors import UsageError
from dstrain.graph.source_code import (
    NoSource,
    Source,
    as_json,
    find_module,
    read_source,
)
from dstrain.storage import hash_json

CODE = "code of "
"""What the facts about modules begin with."""
SHARED = "dstrain.models.functional"
"""The functions of dstrain that families share."""


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
    """Return what a function, or a class, depends on: the same on every machine and
    with every Python that reads the same syntax.

    What a call makes, such as a closure or a partial, is unknown.
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
    left = [(name, False) for name in (SHARED, module) if name]
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
            source = read_source(name)
        except NoSource as reason:
            unknown.append(f"{name} has {reason}")
            continue
        digests[name] = hash_json("module", as_json(source.tree))
        unknown += (f"{name} uses {one}" for one in source.dynamic)
        left += _imported(source, package)
    facts = {f"{CODE}{name}": digests[name] for name in sorted(digests)}
    return Code(facts, tuple(unknown))


def facts_of(code: Code, where: str, declare: str) -> Mapping[str, str]:
    """Return the facts of code that can be followed; for other code, raise UsageError
    that says how to declare a version.
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


def _imported(source: Source, package: str) -> Iterator[tuple[str, bool]]:
    """Yield the modules of a package that a source imports, each with whether it is
    imported as an object.
    """
    for name, taken in _imports(source.tree, source.package):
        if name.partition(".")[0] == package or name == SHARED:
            inner = f"{name}.{taken}".rstrip(".")
            is_module = bool(find_module(inner))
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


def _names_in(module: str) -> set[str]:
    """Return the names that occur in a module: those that it may give are among them."""
    with suppress(NoSource):
        nodes = [*ast.walk(read_source(module).tree)]
        fields = ("asname", "id", "name")
        return {getattr(one, field, "") for one in nodes for field in fields}
    return set()


def _modules_in(package: str) -> Iterator[str]:
    """Yield the modules in a package and in those in it."""
    folders = getattr(find_module(package), "submodule_search_locations", None)
    for info in pkgutil.iter_modules(folders or (), f"{package}."):
        yield info.name
        yield from _modules_in(info.name)
