"""Compute a digest of a function's own code: its syntax, and that of the functions, classes
and constants of its own distribution and of dstrain that it uses, transitively.

Docstrings, comments, annotations of functions and formatting do not count. Functions of
other libraries count by their names alone. Names are resolved as Python would resolve them
now, so that a function that was replaced, wrapped or made by a factory is seen as it is.
"""

import ast
import copyreg
import hashlib
import importlib
import json
import linecache
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache, partial
from inspect import unwrap
from pathlib import PurePath
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from dstrain.errors import DstrainError
from dstrain.storage.hashing import hash_json
from dstrain.storage.safetensors import add_tensor

Chain = tuple[str, ...]
"""A name with the attributes that follow it: `units.encode` is ('units', 'encode')."""
LITERALS = (type(None), bool, int, float, complex, str, bytes, type(...))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
UNCOUNTED = frozenset(
    {"annotation", "returns", "type_comment", "ctx", "kind", "simple"}
)
"""Fields of syntax that change nothing that is computed, or follow from the others."""
DYNAMIC = frozenset({"__import__", "eval", "exec", "globals"})
"""Built-in functions that reach code by a text, which syntax does not show."""
LOCATIONS = frozenset({"__file__", "__path__", "__cached__", "__spec__", "__loader__"})
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
    walk.add("function", function)
    return Code(hash_json("code", walk.finish()), tuple(walk.unknown))


def loading_code(package: str, *parts: Any) -> str:
    """Return the digest of what loads a component: objects, and the code of a family's
    package in them. That of dstrain counts by name: what it loads is as the files say.
    """
    walk = _Walk(frozenset({package}))
    walk.add("how a component is loaded", list(parts))
    return hash_json("code", walk.finish())


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
    entries: list[Any] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)
    """What `_numbers` knows by its id, which is its own only while it is alive."""
    _queue: deque[tuple[int, Callable[[], Any]]] = field(default_factory=deque)

    def finish(self) -> list[Any]:
        """Describe what was found, and what is found by that, until nothing is new."""
        # A queue: a chain of calls may be longer than Python's stack.
        while self._queue:
            number, describe = self._queue.popleft()
            self.entries[number] = describe()
        return self.entries

    def add(self, where: str, value: Any) -> Any:
        """Describe a value; one that cannot be described is unknown."""
        try:
            return self.value(value)
        except _Opaque as reason:
            return self._unknown(f"{where} is {reason}")

    def value(self, value: Any) -> Any:
        """Describe a value as JSON data; raise _Opaque if that is impossible."""
        kind = type(value)
        if kind is str:
            return self._text(value)
        if kind in LITERALS:
            return _literal(value)
        if kind in (list, tuple):
            return [kind.__name__, [self.value(item) for item in value]]
        if kind in (set, frozenset):
            items = [self.value(item) for item in value]
            return ["set", sorted(items, key=json.dumps)]
        if kind in (dict, MappingProxyType):
            pairs = [[self.value(key), self.value(item)] for key, item in value.items()]
            return ["dict", pairs]
        if isinstance(value, FunctionType):
            return self._refer(value, self._function)
        if isinstance(value, type):
            return self._refer(value, self._class)
        if isinstance(value, ModuleType):
            if self._is_own(value.__name__):
                return self._refer(value, self._module)
            return ["module", value.__name__]
        if isinstance(value, Enum):
            return ["member", self.value(kind), value.name]
        if isinstance(value, PurePath):
            path = self._without_folder(str(value))
            if os.path.isabs(path):
                raise _Opaque("an absolute path")
            return ["path", path]
        if isinstance(value, Tensor):
            digest = hashlib.sha256()
            add_tensor(digest, value.detach().cpu())
            return ["tensor", digest.hexdigest()]
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            digest = hashlib.sha256(value.tobytes())
            return ["array", value.dtype.str, list(value.shape), digest.hexdigest()]
        return self._object(value)

    def _text(self, text: str) -> Any:
        """Describe a text; one that names an object of an own package ("module:Name")
        stands for that object.
        """
        module, _, attribute = text.partition(":")
        if attribute.isidentifier() and self._is_own(module):
            with suppress(ImportError, AttributeError):
                found = getattr(importlib.import_module(module), attribute)
                return ["named", ascii(text), self.value(found)]
        return ["str", ascii(self._without_folder(text))]

    def _refer(self, value: Any, describe: Callable[[Any], Any]) -> Any:
        """Return a reference to what is described when its turn comes."""
        if id(value) not in self._numbers:
            self._alive.append(value)
            number = self._new(id(value))
            self._queue.append((number, lambda: describe(value)))
        return {"entry": self._numbers[id(value)]}

    def _new(self, key: Any) -> int:
        number = len(self.entries)
        self._numbers[key] = number
        self.entries.append(None)
        return number

    def _object(self, value: Any) -> Any:
        """Describe an object by what would rebuild it."""
        if id(value) in self._numbers:
            number = self._numbers[id(value)]
            if self.entries[number] == ["opaque"]:
                raise _Opaque(_kind(value))
            return {"entry": number}
        self._alive.append(value)
        number = self._new(id(value))
        try:
            self.entries[number] = self._rebuilt(value)
        except _Opaque:
            self.entries[number] = ["opaque"]
            raise
        except Exception as error:
            # Objects may refuse to be rebuilt in any way they like.
            self.entries[number] = ["opaque"]
            raise _Opaque(_kind(value)) from error
        return {"entry": number}

    def _rebuilt(self, value: Any) -> Any:
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            # Such as a function with a cache.
            return ["wrapper", _kind(value), self.value(wrapped)]
        reducer = copyreg.dispatch_table.get(type(value))
        reduced: Any = reducer(value) if reducer else value.__reduce_ex__(2)
        if isinstance(reduced, str):
            module = getattr(value, "__module__", None) or ""
            if self._is_own(module) and type(value).__module__ != "typing":
                raise _Opaque(f"{_kind(value)} without Python source")
            return ["external", _public(module), reduced]
        call, arguments, *rest = reduced
        state, items, pairs = (*rest, None, None, None)[:3]
        if isinstance(state, dict):
            # What was computed from the rest is there or not.
            cached = [
                name
                for name in state
                if isinstance(getattr(type(value), str(name), None), cached_property)
            ]
            kept = {name: state[name] for name in state if name not in cached}
            state = kept or None
        parts = [arguments, state, list(items or ()), list(pairs or ())]
        return ["object", self.value(call), *map(self.value, parts)]

    def _function(self, function: FunctionType) -> Any:
        code = function.__code__
        name = f"{function.__module__}.{function.__qualname__}"
        globals_ = function.__globals__
        defined_in = str(globals_.get("__name__", ""))
        cells = {}
        variables = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for variable, cell in sorted(variables, key=lambda pair: pair[0]):
            # A variable that is not assigned yet has no value.
            with suppress(ValueError):
                cells[variable] = cell.cell_contents
        # Executed text may be of no module.
        if defined_in in sys.modules and not self._is_own(defined_in):
            return self._external(function, defined_in, cells)
        defaults = [function.__defaults__, function.__kwdefaults__]
        described = ["function", self.add(f"a default argument of {name}", defaults)]
        try:
            node = _find_function(code, globals_)
        except _Opaque as reason:
            return [*described, self._unknown(f"{name} has {reason}")]
        names = _names(code)
        # Decorators and defaults belong to the code around the function.
        around = [*getattr(node, "decorator_list", ()), node.args]
        for part in around:
            names |= {chain[0] for chain in _chains(part)}
        used = self._used(name, node, names, globals_, cells)
        if "__class__" in cells:
            used["__class__"] = self.add(name, cells["__class__"])
        return [*described, _syntax(node), used]

    def _external(
        self, function: FunctionType, defined_in: str, cells: Mapping[str, Any]
    ) -> Any:
        """Describe a function of another library, or of a wrapper that it has made."""
        code = function.__code__
        name = f"{defined_in}.{code.co_qualname}"
        if not cells:
            return ["external", _public(defined_in), code.co_qualname]
        held = {
            variable: self.add(f"{variable!r} in {name}", value)
            for variable, value in cells.items()
        }
        return ["wrapper", _public(defined_in), code.co_qualname, held]

    def _class(self, cls: type) -> Any:
        module, name = cls.__module__, f"{cls.__module__}.{cls.__qualname__}"
        # How an error is shown changes no value.
        is_error = module == DstrainError.__module__ and issubclass(cls, DstrainError)
        if is_error or not self._is_own(module):
            return ["external", _public(module), cls.__qualname__]
        if module not in sys.modules:
            return self._unknown(f"{name} has no module")
        namespace = vars(sys.modules[module])
        bases = [self.add(f"a base of {name}", base) for base in cls.__bases__]
        described = ["class", self.add(name, type(cls)), bases]
        path = [part for part in cls.__qualname__.split(".") if part != "<locals>"]
        try:
            nodes = list(_find_classes(_module_tree(namespace), path))
        except _Opaque as reason:
            return [*described, self._unknown(f"{name} has {reason}")]
        if not nodes:
            # Made by a call, such as of `namedtuple`.
            return [*described, self._definition(module, cls.__name__)]
        methods = {}
        for attribute, value in vars(cls).items():
            for function in _functions_of(value):
                if self._is_written(function):
                    methods[f"{attribute} {function.__name__}"] = self.value(function)
        names = {chain[0] for node in nodes for chain in _chains(node)}
        used = [self._used(name, node, names, namespace, {}) for node in nodes]
        return [*described, [_syntax(node) for node in nodes], used, methods]

    def _is_written(self, method: FunctionType) -> bool:
        """Return whether a method is in its class's source, wrapped or not: what
        `dataclass` and its like add follows from the rest.
        """
        inner = unwrap(method)
        if not self._is_own(str(inner.__globals__.get("__name__", ""))):
            return False
        is_generated = inner.__code__.co_filename.startswith("<")
        return not (is_generated and inner.__name__.startswith("__"))

    def _module(self, module: ModuleType) -> Any:
        """Describe all of a module that is used as a value."""
        try:
            tree = _module_tree(vars(module))
        except _Opaque as reason:
            return self._unknown(f"{module.__name__} has {reason}")
        names = {chain[0] for chain in _chains(tree)}
        used = self._used(module.__name__, tree, names, vars(module), {})
        return ["own module", _syntax(tree), used]

    def _used(
        self,
        where: str,
        node: ast.AST,
        names: set[str],
        namespace: Mapping[str, Any],
        cells: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Describe what the names in a piece of syntax stand for.

        Args:
            where: Name of the piece.
            node: Its syntax.
            names: Names in it that are not its own variables.
            namespace: The globals.
            cells: Variables of functions around it.
        """
        package = str(namespace.get("__package__") or "")
        imported = {}
        for name, (module, attribute) in _imports(node, package).items():
            imported[name] = self._imported(module, attribute)
        found: dict[str, Any] = {}
        for chain in sorted(set(_chains(node))):
            name = chain[0]
            text = ".".join(chain)
            if name in imported:
                found[text] = self._attribute(where, imported[name], chain)
            elif name not in names and name not in cells:
                continue
            elif name in cells:
                found[text] = self._attribute(where, cells[name], chain)
            elif name in LOCATIONS:
                found[text] = ["location"]
            elif isinstance(namespace.get(name), ModuleType):
                found[text] = self._attribute(where, namespace[name], chain)
            elif name in DYNAMIC and name not in namespace:
                found[text] = self._unknown(f"{where} uses {name}()")
            elif name in namespace:
                found[text] = self._global(namespace, name)
        return found

    def _attribute(self, where: str, value: Any, chain: Chain) -> Any:
        """Describe the value of a chain; only attributes of modules are followed."""
        for name in chain[1:]:
            if not (isinstance(value, ModuleType) and self._is_own(value.__name__)):
                break
            if not hasattr(value, name):
                return ["missing"]
            namespace = vars(value)
            value = getattr(value, name)
            if name in namespace and not isinstance(value, ModuleType):
                return self._global(namespace, name)
        return self.add(f"{'.'.join(chain)!r} in {where}", value)

    def _imported(self, module: str, attribute: str) -> Any:
        """Return what an import inside of a function gives; of other libraries, names."""
        if not self._is_own(module):
            return (module, attribute)
        try:
            found: Any = importlib.import_module(module)
            if attribute and not hasattr(found, attribute):
                return importlib.import_module(f"{module}.{attribute}")
        except ImportError:
            return (module, attribute)
        return getattr(found, attribute) if attribute else found

    def _global(self, namespace: Mapping[str, Any], name: str) -> Any:
        """Describe a global: its value, or the syntax that defines it."""
        try:
            return self.value(namespace[name])
        except _Opaque:
            return self._definition(str(namespace.get("__name__", "")), name)

    def _definition(self, module: str, name: str) -> Any:
        """Return a reference to the statements of a module that define a name."""
        key = (module, name)
        if key not in self._numbers:
            number = self._new(key)
            self._queue.append((number, lambda: self._statements(module, name)))
        return {"entry": self._numbers[key]}

    def _statements(self, module: str, name: str) -> Any:
        where = f"{module}.{name}"
        if module not in sys.modules:
            return self._unknown(f"{where} has no module")
        namespace = vars(sys.modules[module])
        try:
            tree = _module_tree(namespace)
        except _Opaque as reason:
            return self._unknown(f"{where} has {reason}")
        package = str(namespace.get("__package__") or "")
        described = []
        for written in tree.body:
            statement = _counted(tree, written)
            if isinstance(statement, ast.Import | ast.ImportFrom):
                source, attribute = _imports(statement, package).get(name, ("", ""))
                if source and attribute and self._is_own(source):
                    described.append(self._definition(source, attribute))
                elif source:
                    described.append(["external", source, attribute])
            elif name in _bound(statement):
                names = {chain[0] for chain in _chains(statement)} - {name}
                used = self._used(where, statement, names, namespace, {})
                described.append([_syntax(statement), used])
        if not described:
            return self._unknown(f"{where} has no definition in its module's source")
        return ["definition", described]

    def _unknown(self, what: str) -> Any:
        self.unknown.append(what)
        return ["unknown"]

    def _is_own(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages

    def _without_folder(self, text: str) -> str:
        """Return a path below an own package's folder without that folder, which differs
        between machines.
        """
        for package in self.packages:
            file = getattr(sys.modules.get(package), "__file__", None)
            folder = os.path.dirname(file or "")
            if folder and (text == folder or text.startswith(folder + os.sep)):
                return f"<{package}>{text[len(folder) :]}"
        return text


def _kind(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}"


def _public(module: str) -> str:
    """Return the name of another library's module up to its private parts, which change
    between versions.
    """
    first, *parts = module.split(".")
    public = [first]
    for part in parts:
        if part.startswith("_"):
            break
        public.append(part)
    return ".".join(public)


def _literal(value: Any) -> Any:
    # Not str(): Python refuses to write integers of more than 4,300 digits in decimal.
    text = hex(value) if type(value) is int else ascii(value)
    return [type(value).__name__, text]


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in an attribute of a class."""
    inner = [getattr(value, name, None) for name in ("fget", "fset", "fdel", "func")]
    for one in (value, getattr(value, "__func__", None), *inner):
        if isinstance(one, FunctionType):
            yield one


def _children(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields of syntax that count."""
    for name in node._fields:
        content = getattr(node, name, None)
        if name == "annotation" and isinstance(node, _Field):
            yield name, content
        if content is None or name in UNCOUNTED:
            continue
        if isinstance(content, list):
            content = [_counted(node, one) for one in content if not _is_idle(one)]
            if not content:
                continue
        yield name, content


class _Field(ast.AnnAssign):
    """An annotated name in the body of a class, whose annotation may declare a field."""


def _counted(parent: ast.AST, node: Any) -> Any:
    """Return a statement as it counts: an annotation is none of a plain variable."""
    if not isinstance(node, ast.AnnAssign):
        return node
    if isinstance(parent, ast.ClassDef):
        return _Field(node.target, node.annotation, node.value, node.simple)
    if node.value is None:
        return node
    return ast.Assign([node.target], node.value)


def _is_idle(node: Any) -> bool:
    """Return whether a statement does nothing: a docstring or another constant, `pass`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Pass)


def _syntax(node: Any) -> Any:
    """Return syntax as JSON data.

    Not `ast.dump`, which writes other text in other versions of Python.
    """
    if isinstance(node, ast.Constant):
        return _literal(node.value)
    if isinstance(node, ast.JoinedStr):
        return ["JoinedStr", _joined(node)]
    if isinstance(node, ast.AST):
        fields = {name: _syntax(content) for name, content in _children(node)}
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [_syntax(one) for one in node]
    return ascii(node)


def _joined(node: ast.JoinedStr) -> list[Any]:
    """Return the parts of an f-string, neighbouring texts as one: versions of Python
    divide them differently.
    """
    parts: list[Any] = []
    for one in node.values:
        text = one.value if isinstance(one, ast.Constant) else None
        if not isinstance(text, str):
            parts.append(_syntax(one))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += ascii(text)[1:-1]
        elif text:
            parts.append(ascii(text)[1:-1])
    return parts


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax directly inside of a piece that counts."""
    for _, content in _children(node):
        for one in content if isinstance(content, list) else [content]:
            if isinstance(one, ast.AST):
                yield one


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a piece of syntax and all in it that counts."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(_parts(one))


def _chains(node: ast.AST) -> Iterator[Chain]:
    """Yield the names that are read, each with its attributes."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        attributes: list[str] = []
        while isinstance(one, ast.Attribute):
            attributes.insert(0, one.attr)
            one = one.value
        if isinstance(one, ast.Name):
            if isinstance(one.ctx, ast.Load):
                yield (one.id, *attributes)
        else:
            waiting.extend(_parts(one))


def _names(code: CodeType) -> set[str]:
    """Return the names in code that may be global: those of attributes among them."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _imports(node: ast.AST, package: str) -> dict[str, tuple[str, str]]:
    """Return the names that imports in a piece of syntax bind: name -> module and
    attribute, '' for the module itself.
    """
    found = {}
    for one in _walk(node):
        if isinstance(one, ast.Import):
            for alias in one.names:
                first = alias.name.partition(".")[0]
                if alias.asname:
                    found[alias.asname] = (alias.name, "")
                else:
                    found[first] = (first, "")
        elif isinstance(one, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - one.level + 1]
            parts = [*(parents if one.level else []), *filter(None, [one.module])]
            for alias in one.names:
                found[alias.asname or alias.name] = (".".join(parts), alias.name)
    return found


def _bound(statement: ast.AST) -> set[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return {getattr(statement, "name", "")}
    names = set()
    for one in _walk(statement):
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            names.add(one.id)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(one.name)
    return names


def _find_classes(node: ast.AST, path: list[str]) -> Iterator[ast.ClassDef]:
    """Yield the definitions of a class by its qualified name; branches may have several."""
    for one in _parts(node):
        if not isinstance(one, (*FUNCTIONS, ast.ClassDef)):
            yield from _find_classes(one, path)
        elif getattr(one, "name", "") == path[0]:
            if len(path) > 1:
                yield from _find_classes(one, path[1:])
            elif isinstance(one, ast.ClassDef):
                yield one


def _module_tree(namespace: Mapping[str, Any]) -> ast.Module:
    """Return the syntax of a module; raise _Opaque if there is no source."""
    tree, _ = _parsed(_source(str(namespace.get("__file__")), namespace))
    return tree


def _source(file: str, namespace: Mapping[str, Any]) -> str:
    # It forgets what has changed on disk, and also finds sources in zip files and those
    # of notebooks.
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file, dict(namespace)))
    if not text:
        raise _Opaque("no Python source")
    return text


@lru_cache(maxsize=64)
def _parsed(source: str) -> tuple[ast.Module, list[CodeType]]:
    """Return the syntax of a module and all code that it compiles to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
            codes = [compile(source, "<source>", "exec", dont_inherit=True)]
        except (SyntaxError, ValueError) as error:
            raise _Opaque(f"source that cannot be parsed: {error}") from error
    for code in codes:
        # The list grows while it is read.
        codes.extend(one for one in code.co_consts if isinstance(one, CodeType))
    return tree, codes


def _find_function(code: CodeType, namespace: Mapping[str, Any]) -> Any:
    """Return the syntax of a function; raise _Opaque if its source is not there, or is
    not what it was compiled from.
    """
    tree, codes = _parsed(_source(code.co_filename, namespace))
    # A file may be edited while the code that was read from it is running.
    if not any(_is_same(code, one) for one in codes):
        raise _Opaque("another source on disk than the code that runs")
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
        and getattr(node, "name", "<lambda>") == code.co_name
        and _first_line(node) == code.co_firstlineno
    ]
    if len(found) > 1:
        # Several lambdas in one line.
        found = [node for node in found if _contains(node, code)]
    if len(found) != 1:
        raise _Opaque("no source of its own in its line")
    return found[0]


def _first_line(node: Any) -> int:
    first: int = node.lineno
    for decorator in getattr(node, "decorator_list", ()):
        first = min(first, decorator.lineno)
    return first


def _contains(node: Any, code: CodeType) -> bool:
    """Return whether all of some code comes from a piece of syntax."""
    places = [
        (start_line, start, end_line, end)
        for start_line, end_line, start, end in code.co_positions()
        if start_line
        and end_line
        and start is not None
        and end is not None
        and end > start
    ]
    return bool(places) and all(
        (node.lineno, node.col_offset) <= (start_line, start)
        and (end_line, end) <= (node.end_lineno, node.end_col_offset)
        for start_line, start, end_line, end in places
    )


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Return whether two pieces of code do the same, wherever they are."""
    if (one.co_name, one.co_code, one.co_names) != (
        other.co_name,
        other.co_code,
        other.co_names,
    ):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for mine, others in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, CodeType) and isinstance(others, CodeType):
            if not _is_same(mine, others):
                return False
        elif repr(mine) != repr(others) and mine != others:
            return False
    return True
