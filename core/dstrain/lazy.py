"""Load the public names of a package on first use."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


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
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            modules |= {alias.name: str(node.module) for alias in node.names}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return load, lambda: sorted(modules), sorted(modules)
