"""Files that cannot be read although they are there, as where the machine has a fault."""

import builtins
import io
import os
from pathlib import Path
from typing import Any

import pytest


def make_unreadable(patch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Let Python fail to open a file, with this error of the system."""
    real = io.open

    def opened(file: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(file, int) and os.fspath(file) == os.fspath(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(file, *arguments, **named)

    for module in (io, builtins):
        patch.setattr(module, "open", opened)
