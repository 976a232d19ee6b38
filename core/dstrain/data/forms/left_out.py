"""What is in a folder of images and videos, or below it, and is not read."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from dstrain.data.forms.captions import SUFFIXES as CAPTIONS
from dstrain.data.forms.listing import (
    MEDIA,
    VIDEOS,
    belongs_to_another,
    names_in,
    without_ours,
)
from dstrain.data.forms.metadata import SUFFIXES as TABLES
from dstrain.data.forms.naming import main_column
from dstrain.data.table import Table, unicode_forms
from dstrain.graph import Input

DEPTH = 2
"""Folders below one in which tables are looked for, such as `data/train`."""


def left_out(folder: Path, is_image: bool) -> list[str]:
    """Return a line with the number of files in a folder, and below it, that are not
    read; none if all are.

    Raises as `list_media`.

    Args:
        folder: The folder.
        is_image: Whether images alone are read, and videos left out.
    """
    read = MEDIA - VIDEOS if is_image else MEDIA
    unread = []
    for prefix, names in _folders(folder, ""):
        listed = [os.fsencode(name) for name in names]
        media = {
            name
            for name in names
            if os.path.splitext(name)[1].lower() in read
            and not belongs_to_another(listed, name)
        }
        stems = {os.path.splitext(name)[0] for name in media}
        for name in names:
            stem, ending = os.path.splitext(name)
            is_caption = ending.lower() in CAPTIONS and stem in stems
            if not (name in media or is_caption or name.endswith("/")):
                unread.append(prefix + name)
    return [_said("file", unread, "not read")] if unread else []


def _said(thing: str, names: Sequence[str], what: str) -> str:
    are = f"1 {thing} is" if len(names) == 1 else f"{len(names)} {thing}s are"
    first = names[0] if names[0].isprintable() else repr(names[0])
    return f"{are} {what}, such as {first}"


def left_out_of(folder: Path, inputs: Mapping[str, Input]) -> list[str]:
    """Return the lines of `left_out` for a variant, by its table of inputs."""
    column = main_column(inputs, True)
    return left_out(folder, column is not None and not column.from_video)


def hidden_by(table: Table) -> str:
    """Return what lies beside a table with captions of its own and is not in it, such as
    what was added after an earlier run wrote the table; '' for nothing.
    """
    names = [
        os.path.splitext(name)
        for name in os.listdir(table.path.parent)
        if not name.startswith(".")
    ]
    captions = {
        stem for stem, ending in names if ending.lower() in (".txt", ".caption")
    }
    hidden = {
        stem + ending
        for stem, ending in names
        if stem in captions and ending.lower() in MEDIA
    }
    for row in table.rows if hidden else ():
        for value in row.values():
            files = value if isinstance(value, list) else [value]
            for file in files:
                hidden.difference_update(unicode_forms(os.path.basename(file)))
    return _said("captioned file", sorted(hidden), "not in it") if hidden else ""


def _folders(folder: Path, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and those below it, each with the names in it, as `names_in` has
    them.
    """
    listed = without_ours(names_in(folder / prefix), prefix)
    names = [os.fsdecode(name) for name in listed]
    yield prefix, names
    for name in names:
        if name.endswith("/"):
            yield from _folders(folder, prefix + name)


def tables_below(folder: Path, endings: Collection[str]) -> list[Path]:
    """Return metadata, and files with one of these endings, in folders below one, relative
    to it; links are not followed. Those for training come first.
    """
    found = [one for one in _tables(folder, endings, DEPTH) if one.parent != folder]
    below = [path.relative_to(folder) for path in found]
    return sorted(below, key=lambda path: ("train" not in path.parts, path))


def _tables(folder: Path, endings: Collection[str], depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in listed:
        if entry.name.startswith("."):
            continue
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            if depth:
                yield from _tables(path, endings, depth - 1)
        elif path.suffix in endings or (
            path.stem == "metadata" and path.suffix in TABLES
        ):
            yield path
