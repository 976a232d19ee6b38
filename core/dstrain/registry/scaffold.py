"""`dstrain plugins new NAME`: a family's package, written from the template that this
distribution carries.
"""

import keyword
import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from dstrain.errors import UsageError
from dstrain.registry.discovery import installed

TEMPLATE = "my_model"
"""The name of the template's own family; that of the new one replaces it, in files and
in their names.
"""


def write_plugin(name: str, folder: Path) -> tuple[Path, ...]:
    """Write the package of a family to a new folder; returns the files written.

    Raises UsageError for a name that is none, or that an installed family has, and for
    a folder that exists.
    """
    check_name(name)
    if folder.exists():
        raise UsageError(
            "dstrain plugins new", f"{folder} exists; what is there is left as it is"
        )
    written = []
    for place, content in _template(files("dstrain.registry") / "template"):
        path = folder / _renamed(str(place), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_renamed(content, name), encoding="utf-8")
        written.append(path)
    return tuple(written)


def check_name(name: str) -> None:
    """Raise UsageError for a name that cannot be a package's, or that an installed
    family has.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(
        name
    ):
        what = f"{name!r} is no name of a family; want lower-case letters, digits and single underscores: my_model"
        raise UsageError("dstrain plugins new", what)
    taken = [plugin for plugin in installed() if plugin.name == name]
    if taken:
        raise UsageError(
            "dstrain plugins new",
            f"a family named {name!r} is installed, by {taken[0].where}",
        )


def _renamed(text: str, name: str) -> str:
    return text.replace(TEMPLATE, name).replace(
        TEMPLATE.replace("_", "-"), name.replace("_", "-")
    )


def _template(
    folder: Traversable, place: PurePosixPath | None = None
) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield each file of the template: its place below the folder, and its text."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        at = (place or PurePosixPath()) / entry.name
        if entry.is_dir() and not entry.name.startswith(("__pycache__", ".")):
            yield from _template(entry, at)
        elif entry.is_file():
            yield at, entry.read_text(encoding="utf-8")
