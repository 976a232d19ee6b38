"""Load names on first use: the public ones of a package, and those of large libraries."""

import ast
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any

from dstrain.console import silenced

OPTIONAL = ("bitsandbytes", "torchao")
"""Optional libraries that others import where they are installed."""
ASKING = frozenset({"diffusers", "transformers", "peft"})
"""The libraries that import these, and note what is installed."""
_is_own_process: ContextVar[bool] = ContextVar("own_process", default=False)


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package (`__name__`,
    `__file__`) whose stub `__init__.pyi` says where each name is from, for type
    checkers, too.
    """
    modules: dict[str, str] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            modules |= {alias.name: str(node.module) for alias in node.names}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return load, lambda: sorted(modules), sorted(modules)


def import_name(module: str, name: str) -> Any:
    """Import a name of a large library, which reports on its optional parts; see
    `without_optional`.
    """
    with without_optional(), silenced(logging.WARNING):
        return getattr(import_module(module), name)


@contextmanager
def own_process() -> Iterator[None]:
    """Within, this thread is dstrain's alone, as it is for a command line: what libraries
    take for not installed stays so. Not where one of them has noted before what is there.
    """
    is_own = _is_own_process.get() or not ASKING.intersection(sys.modules)
    before = _is_own_process.set(is_own)
    try:
        yield
    finally:
        _is_own_process.reset(before)


@contextmanager
def without_optional() -> Iterator[None]:
    """Within, a process of dstrain's own imports libraries as if the `OPTIONAL` ones were
    not installed, unless they are imported already.

    They would cost every run more than a second, and print lines, though few runs need
    them; those that do import them themselves. A script or notebook pays that, since
    libraries remember what they found: its own pipelines may need them.
    """
    names = OPTIONAL if _is_own_process.get() else ()
    absent = [name for name in names if name not in sys.modules]
    # None makes an import fail as if the library were not installed.
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # modules, to typeshed
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)
