"""Compute digests of the code that a function depends on: of its module, and of the modules
of its own top-level package that this imports, transitively.

A module counts by its syntax, without docstrings, comments and formatting. A package's
`__init__` counts only if a name is taken from it; one that is imported as an object counts
with all its modules. What a function was made with, such as the variables of a closure,
counts by value. Of dstrain, the functions that families share count.
"""

import ast
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph.source_code import NoSource, as_json, imports, literal, read_source
from dstrain.storage import hash_json

LITERALS = (type(None), bool, int, float, complex, bytes, type(...))
CODE = "code of "
"""What the facts about modules begin with."""
SHARED = "dstrain.models.functional"
"""The functions of dstrain that families share."""


@dataclass(frozen=True)
class Code:
    """What a function depends on."""

    facts: Mapping[str, str]
    """"code of MODULE" -> the digest of its syntax, and that of what the function holds."""
    unknown: tuple[str, ...]
    """What cannot be taken into account, with the reason."""

    @property
    def digest(self) -> str:
        """Return one digest of it all."""
        return hash_json("code", dict(self.facts))


class _Opaque(Exception):
    """A value that cannot be described."""


def code_of(function: Callable[..., Any]) -> Code:
    """Return what a function depends on.

    It is the same in every process, on every machine and with every version of Python
    that reads the same syntax.
    """
    return _Walk(module_of(function).partition(".")[0]).code_of(function)


def loading_code(module: str, *parts: Any) -> Code:
    """Return what the loading of a component depends on: the module that declares it, and
    the objects that load it.
    """
    walk = _Walk(module.partition(".")[0])
    walk.follow(module)
    return walk.code_of(list(parts))


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


@dataclass
class _Walk:
    """A walk over all modules that something depends on."""

    package: str
    """The top-level package whose modules are followed."""
    modules: dict[str, str] = field(default_factory=dict)
    """Module -> digest of its syntax."""
    unknown: list[str] = field(default_factory=list)

    def code_of(self, value: Any) -> Code:
        """Return what a value depends on."""
        held = None
        try:
            held = self._value(value)
        except (_Opaque, RecursionError) as reason:
            self.unknown.append(str(reason))
        self.follow(SHARED)
        facts = {f"{CODE}{name}": self.modules[name] for name in sorted(self.modules)}
        return Code({"holds": hash_json("held", held), **facts}, tuple(self.unknown))

    def follow(self, module: str, *, is_whole: bool = False) -> None:
        """Take a module into account, and what it imports; of a package all modules, if it
        is whole.
        """
        left = [(module, is_whole)]
        while left:
            name, is_whole = left.pop()
            if not self._is_own(name):
                continue
            if is_whole:
                left += ((one, False) for one in _modules_in(name))
            if name not in self.modules:
                left += self._read(name)

    def _read(self, module: str) -> Iterator[tuple[str, bool]]:
        """Digest a module; yield the modules that it imports, each with whether it is
        imported as an object.
        """
        self.modules[module] = ""
        try:
            source = read_source(module)
        except NoSource as reason:
            self.unknown.append(f"{module} has {reason}")
            return
        self.modules[module] = hash_json("module", as_json(source.tree))
        self.unknown += (f"{module} uses {name}" for name in source.dynamic)
        for name, taken in imports(source.tree, source.package):
            if self._is_own(name):
                inner = f"{name}.{taken}".rstrip(".")
                is_module = bool(_find(inner))
                if is_module:
                    yield inner, True
                # A package may give another thing by the name of one of its modules.
                if not is_module or _names_in(name) & {taken, "*", "__getattr__"}:
                    yield name, False

    def _is_own(self, module: str) -> bool:
        top = module.partition(".")[0]
        return bool(top) and (top == self.package or module == SHARED)

    def _value(self, value: Any) -> Any:
        """Describe a value as JSON data, and follow the code in it; raise _Opaque if that
        is impossible.
        """
        kind = type(value)
        if kind in LITERALS:
            return literal(value)
        if kind in (list, tuple):
            return [kind.__name__, [self._value(item) for item in value]]
        if kind in (set, frozenset):
            return ["set", sorted(map(repr, map(self._value, value)))]
        if kind in (dict, MappingProxyType):
            return ["dict", [self._value(pair) for pair in value.items()]]
        if kind is str or isinstance(value, PurePath):
            if PurePath(value).is_absolute():
                raise _Opaque(f"holds an absolute path, {str(value)!r}")
            # "module:Name" stands for an object.
            self.follow(str(value).partition(":")[0])
            return [kind.__name__, ascii(str(value))]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            name = value.__qualname__
            if "<locals>" in name and self._is_own(value.__module__):
                raise _Opaque(f"holds {name}, a class that a function made")
            return self._named(value.__module__, name)
        if isinstance(value, ModuleType):
            self.follow(value.__name__, is_whole=True)
            return ["module", value.__name__]
        if isinstance(value, Enum):
            return [self._value(kind), value.name]
        return self._object(value)

    def _function(self, function: FunctionType) -> Any:
        code = function.__code__
        module = str(function.__globals__.get("__name__"))
        held: list[Any] = [self._named(module, function.__qualname__)]
        if module in self.modules or not _find(module):
            where = f"{module}.{function.__qualname__}"
            try:
                codes = read_source(module).codes
            except NoSource as reason:
                raise _Opaque(f"{where} has {reason}") from reason
            if code not in codes:
                raise _Opaque(f"{where} has another source than the code that runs")
            # Functions of one name, such as lambdas, are told apart by their order.
            same = [one for one in codes if one.co_qualname == code.co_qualname]
            held.append(same.index(code))
        for cell in function.__closure__ or ():
            # A variable that is not assigned yet has no value.
            with suppress(ValueError):
                held.append(self._value(cell.cell_contents))
        if "<locals>" in code.co_qualname:
            held.append(self._value(function.__defaults__))
            held.append(self._value(function.__kwdefaults__))
        return held

    def _named(self, module: str, name: str) -> Any:
        """Describe what a module defines, and follow the module."""
        self.follow(module)
        # Private modules of other libraries change between versions.
        return [module.partition("._")[0], name]

    def _object(self, value: Any) -> Any:
        """Describe an object by what pickle would rebuild it from."""
        try:
            if isinstance(value, Tensor):
                raise TypeError
            reduced = value.__reduce_ex__(2)
        except Exception as error:
            # Objects may refuse to be taken apart in any way they like.
            kind = type(value)
            raise _Opaque(f"holds a {kind.__module__}.{kind.__qualname__}") from error
        if isinstance(reduced, str):
            return self._named(value.__module__, reduced)
        parts = (list(one) if isinstance(one, Iterator) else one for one in reduced)
        return ["object", [self._value(one) for one in parts]]


def _find(module: str) -> Any:
    """Return where Python finds a module; None for what is no module."""
    with suppress(Exception):  # it imports the package, which may raise anything
        return importlib.util.find_spec(module)
    return None


def _names_in(module: str) -> set[str]:
    """Return the names that occur in a module: those that it may give are among them."""
    with suppress(NoSource):
        nodes = [*ast.walk(read_source(module).tree)]
        fields = ("asname", "id", "name")
        return {getattr(one, field, "") for one in nodes for field in fields}
    return set()


def _modules_in(package: str) -> Iterator[str]:
    """Yield the modules in a package and in those in it."""
    folders = getattr(_find(package), "submodule_search_locations", None)
    for info in pkgutil.iter_modules(folders or (), f"{package}."):
        yield info.name
        yield from _modules_in(info.name)
