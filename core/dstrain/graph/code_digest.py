"""Compute a digest of a function's own code: its syntax, and that of the functions, classes
and constants of its own distribution and of dstrain that it uses, transitively.

Docstrings, comments, annotations and formatting do not count, and other libraries count
by names alone. A global counts by what it is now, so that a replaced function is seen; if
that cannot be compared, it counts by the statements that define it.
"""

import ast
import hashlib
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from pathlib import PurePath
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

from dstrain.errors import DstrainError
from dstrain.graph.source_code import (
    NoSource,
    as_json,
    find_function,
    imports,
    literal,
    names_bound,
    names_used,
    source_of,
)
from dstrain.storage import hash_json
from dstrain.storage.safetensors import add_tensor

LITERALS = (type(None), bool, int, float, complex, bytes, type(...))
DYNAMIC = frozenset({"__import__", "eval", "exec", "globals"})
"""Built-in functions that reach code by a text, which syntax does not show."""
BY_NAME = (importlib.import_module, pkgutil.resolve_name)
"""Functions that do the same."""
ORIGIN = ("__module__", "__qualname__")
LOCATIONS = frozenset({"__file__", "__path__", "__spec__"})
"""Globals of a module that say where it lies, which may differ between machines."""


@dataclass(frozen=True)
class Code:
    """The digest of a function's code, and what it could not take into account."""

    digest: str
    unknown: tuple[str, ...]
    """What has no source or no value that could be compared, with the reason."""


class _Opaque(Exception):
    """A value that cannot be described."""


def code_of(function: Callable[..., Any]) -> Code:
    """Return the digest of a function's code.

    It is the same in every process, on every machine and with every version of Python
    that reads the same syntax.
    """
    walk = _Walk(frozenset({module_of(function).partition(".")[0], "dstrain"}))
    return Code(walk.digest("function", function), tuple(walk.unknown))


def loading_code(package: str, *parts: Any) -> str:
    """Return the digest of what loads a component: objects, and the code of a family's
    package in them. That of dstrain counts by name: what it loads is as the files say.
    """
    return _Walk(frozenset({package})).digest("how a component is loaded", list(parts))


def module_of(function: Callable[..., Any]) -> str:
    """Return the name of the module of a function, or of the one that a partial calls."""
    while isinstance(function, partial):
        function = function.func
    return function.__module__ or ""


@dataclass
class _Walk:
    """A walk over everything that a function uses.

    Each function, class and definition is an entry of a list, in the order in which they
    are found, and others refer to it by its number: they may use each other.
    """

    packages: frozenset[str]
    """Top-level packages whose code is followed."""
    unknown: list[str] = field(default_factory=list)
    _entries: list[Callable[[], Any]] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def digest(self, where: str, value: Any) -> str:
        """Return the digest of a value and of everything that it uses."""
        first = self._known(where, value)
        # Not by recursion, as a chain of calls may be longer than Python's stack. The
        # list grows while it is read.
        return hash_json("code", [first, *(describe() for describe in self._entries)])

    def _known(self, where: str, value: Any) -> Any:
        """Describe a value; one that cannot be described is unknown."""
        try:
            return self._value(value)
        except _Opaque as reason:
            return self._unknown(f"{where} is {reason}")

    def _unknown(self, what: str) -> None:
        self.unknown.append(what)

    def _entry(self, key: Any, describe: Callable[[], Any]) -> Any:
        """Return a reference to what is described when its turn comes."""
        if key not in self._numbers:
            self._numbers[key] = len(self._entries)
            self._entries.append(describe)
        return {"entry": self._numbers[key]}

    def _is_own(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages

    def _value(self, value: Any) -> Any:
        """Describe a value as JSON data; raise _Opaque if that is impossible."""
        kind = type(value)
        if kind in LITERALS:
            return literal(value)
        if kind in (list, tuple):
            return [kind.__name__, [self._value(item) for item in value]]
        if kind in (set, frozenset):
            items = [self._value(item) for item in value]
            return ["set", sorted(items, key=json.dumps)]
        if kind in (dict, MappingProxyType):
            return ["dict", [self._value(pair) for pair in value.items()]]
        if kind is str or isinstance(value, PurePath):
            return [kind.__name__, self._text(str(value))]
        if isinstance(value, FunctionType) and self._is_followed(value):
            return self._entry(id(value), lambda: self._function(value))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType):
            return self._definition(value.__name__, "")
        if isinstance(value, Enum):
            return ["member", self._value(kind), value.name]
        if isinstance(value, Tensor):
            digest = hashlib.sha256()
            add_tensor(digest, value.detach().cpu())
            return ["tensor", digest.hexdigest()]
        try:
            return self._object(value)
        except Exception as error:
            # Objects may refuse to be taken apart in any way they like.
            reason = f"a {kind.__module__}.{kind.__qualname__}"
            raise _Opaque(reason) from error

    def _text(self, text: str) -> Any:
        """Describe a text; one that names an object of an own package ("module:Name")
        stands for that object.
        """
        for package in self.packages:
            # Where it lies differs between machines.
            for folder in getattr(sys.modules.get(package), "__path__", ()):
                text = text.replace(folder, package)
        if os.path.isabs(text) and os.path.dirname(text) != os.sep:
            raise _Opaque("an absolute path")
        module, _, attribute = text.partition(":")
        if attribute.isidentifier() and self._is_own(module):
            return [ascii(text), self._value(_imported(module, attribute))]
        return ascii(text)

    def _object(self, value: Any) -> Any:
        """Describe an object by what pickle would rebuild it from, and a function of
        another library by its name and what it wraps.
        """
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            name = value.__code__.co_qualname
            return [_external(value.__globals__["__name__"], name), self._value(cells)]
        reduced = value.__reduce_ex__(2)

        def is_cached(name: str) -> bool:
            return isinstance(getattr(type(value), name, None), cached_property)

        if isinstance(reduced, str):
            if self._is_own(value.__module__):
                raise _Opaque
            return _external(value.__module__, reduced)
        parts = []
        for part in reduced:
            if isinstance(part, Iterator):
                part = list(part)
            if isinstance(part, dict):
                # What was computed from the rest is there or not.
                part = {
                    name: part[name] for name in part if not is_cached(name)
                } or None
            parts.append(part)
        return ["object", self._value(parts)]

    def _is_followed(self, function: FunctionType) -> bool:
        module = str(function.__globals__.get("__name__", ""))
        # Executed text may be of no module.
        return self._is_own(module) or module not in sys.modules

    def _function(self, function: FunctionType) -> Any:
        code = function.__code__
        where = f"{function.__module__}.{function.__qualname__}"
        try:
            node = find_function(code, function.__globals__)
        except NoSource as reason:
            return self._unknown(f"{where} has {reason}")
        defaults = [function.__defaults__, function.__kwdefaults__]
        held = {"": self._known(f"a default argument of {where}", defaults)}
        for name, cell in zip(
            code.co_freevars, function.__closure__ or (), strict=True
        ):
            # A variable that is not assigned yet has no value.
            with suppress(ValueError):
                held[name] = self._known(f"{name!r} in {where}", cell.cell_contents)
        return [held, self._syntax(where, node, function.__globals__, held)]

    def _class(self, cls: type) -> Any:
        module, name = cls.__module__, cls.__qualname__
        # How an error is shown changes no value.
        is_error = module == DstrainError.__module__ and issubclass(cls, DstrainError)
        if is_error or not self._is_own(module):
            return _external(module, name)
        if "<locals>" in name:
            raise _Opaque(f"{module}.{name}, a class made by a function")
        return self._entry(id(cls), lambda: self._own_class(cls))

    def _own_class(self, cls: type) -> Any:
        """Describe a class by its definition, what has replaced its methods, and its plain
        attributes, which may be assigned later.
        """
        module, name = cls.__module__, cls.__qualname__
        replaced = {
            attribute: self._known(f"{name}.{attribute}", method)
            for attribute, method in vars(cls).items()
            if isinstance(method, FunctionType)
            and self._is_own(method.__module__)
            and (method.__module__, method.__qualname__)
            != (module, f"{name}.{attribute}")
        }
        attributes = {}
        for attribute, value in sorted(vars(cls).items()):
            if type(value) in (*LITERALS, str) and not attribute.startswith("__"):
                # A path counts by what defines it.
                with suppress(_Opaque):
                    attributes[attribute] = self._value(value)
        definition = self._definition(module, name.partition(".")[0])
        return [name, definition, replaced, attributes]

    def _definition(self, module: str, name: str) -> Any:
        """Return a reference to the statements of a module that define a name; '' stands
        for all of it.
        """
        if not self._is_own(module):
            return _external(module, name)
        return self._entry((module, name), lambda: self._statements(module, name))

    def _statements(self, module: str, name: str) -> Any:
        where = f"{module}.{name}".rstrip(".")
        namespace = vars(sys.modules[module]) if module in sys.modules else {}
        try:
            tree = source_of(str(namespace.get("__file__")), namespace).tree
        except NoSource as reason:
            return self._unknown(f"{where} has {reason}")
        found = [one for one in tree.body if not name or name in names_bound(one)]
        if name and not found:
            return self._unknown(f"{where} has no definition in its module's source")
        return [self._syntax(where, one, namespace, {}) for one in found]

    def _syntax(
        self,
        where: str,
        node: ast.AST,
        namespace: Mapping[str, Any],
        held: Mapping[str, Any],
    ) -> Any:
        """Describe syntax, and what the names in it stand for, except those in `held`. A
        variable counts as the global of its name, too.
        """
        used = {}
        for module, name in imports(node, str(namespace.get("__package__") or "")):
            if self._is_own(module):
                found = _imported(module, name)
                used[f"{module}.{name}"] = self._global(module, name, found)
        module = str(namespace.get("__name__", ""))
        for name, attribute in sorted(set(names_used(node))):
            if name in held or name in LOCATIONS:
                continue
            if name in namespace:
                value = namespace[name]
                reached = (value, getattr(value, attribute, None))
                if any(one is other for one in reached for other in BY_NAME):
                    self._unknown(f"{where} uses {name} to import by name")
                found = self._global(module, name, value, attribute)
                used[f"{name}.{attribute}"] = found
            elif name in DYNAMIC:
                self._unknown(f"{where} uses {name}()")
        return [as_json(node), used]

    def _global(self, module: str, name: str, value: Any, attribute: str = "") -> Any:
        """Describe a global of a module by its value or, if it has none that can be
        compared, by its definition; of an own module only the attribute that is used.
        """
        if isinstance(value, ModuleType) and self._is_own(value.__name__) and attribute:
            found = getattr(value, attribute, None)
            return self._global(value.__name__, attribute, found)
        try:
            return self._value(value)
        except _Opaque as reason:
            origin = [str(getattr(value, one, "")) for one in ORIGIN]
            return [str(reason), origin, self._definition(module, name)]


def _external(module: str, name: str) -> Any:
    """Return what another library defines, by its name, without the private parts of its
    module, which change between versions.
    """
    return ["external", module.partition("._")[0], name]


def _imported(module: str, name: str) -> Any:
    """Return what an import gives, or its text if it fails."""
    place = f"{module}.{name}".rstrip(".")
    try:
        return pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError):
        return place
