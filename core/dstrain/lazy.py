"""Load names on first use: the public ones of a package, and those of large libraries."""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

QUANTIZERS = ("bitsandbytes", "torchao")
"""Optional libraries that peft, transformers and diffusers import where they are installed."""


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose stub says where
    each name is from.

    The stub is what type checkers read, so the names are written down once.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package; `__init__.pyi` lies beside it.
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
    """Import a name of a large library without the quantizers that it would import."""
    with without_quantizers():
        return getattr(import_module(module), name)


@contextmanager
def without_quantizers() -> Iterator[None]:
    """Within, libraries take those that quantize for not installed, unless they are
    imported already.

    They would cost every run more than a second, and print lines, though few runs
    quantize; those that do import them themselves. peft then takes a layer of
    bitsandbytes for what it also is, a linear layer.
    """
    hidden = [name for name in QUANTIZERS if name not in sys.modules]
    # None makes an import fail as if the library were not installed.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
