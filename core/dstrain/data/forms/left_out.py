"""What is in a folder of images and videos, or below it, and is not read."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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

UNREAD_IMAGES = frozenset(
    {
        *(".heic", ".heif", ".jxl", ".jp2", ".j2k", ".psd", ".xcf", ".tga", ".exr"),
        *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf", ".rw2"),
        *(".hdr", ".svg", ".eps"),
    }
)
UNREAD_VIDEOS = frozenset(
    {".3gp", ".flv", ".m2ts", ".mpeg", ".mpg", ".mts", ".ogv", ".wmv"}
)
REPEATS = re.compile(r"\d+_.+")
"""Folders that say how often kohya's scripts repeat their images, and of what they are."""
DEPTH = 2
"""Folders below one in which tables are looked for, such as `data/train`."""


@dataclass
class _Count:
    """How many things there are, and the first of them."""

    number: int = 0
    first: str = ""

    def add(self, name: str) -> None:
        self.number += 1
        self.first = self.first or name

    def are(self, thing: str) -> str:
        """Return such as '1 video is' or '2 videos are'."""
        return f"1 {thing} is" if self.number == 1 else f"{self.number} {thing}s are"


def left_out(folder: Path, is_image: bool) -> list[str]:
    """Return a line for each kind of thing in a folder, and below it, that is not read:
    captions without an image or a video, and images and videos of formats that are not
    read.

    Raises as `list_media`.

    Args:
        folder: The folder.
        is_image: Whether images alone are read, and videos left out.
    """
    captions, images, videos, others = _Count(), _Count(), _Count(), _Count()
    parts = _Count()
    repeats = ""
    for prefix, names in _folders(folder, ""):
        stems = set()
        listed = [os.fsencode(name) for name in names]
        for name in names:
            stem, ending = os.path.splitext(name)
            # A caption of a file that is not read has one, and is none too many.
            if ending.lower() in MEDIA | UNREAD_IMAGES | UNREAD_VIDEOS:
                stems.add(stem)
        for name in names:
            stem, ending = os.path.splitext(name)
            kind = ending.lower()
            if name.endswith("/"):
                is_one = REPEATS.fullmatch(name[:-1]) is not None
                repeats = repeats or (name[:-1] if is_one else "")
            elif kind in MEDIA and belongs_to_another(listed, name):
                parts.add(prefix + name)
            elif kind in CAPTIONS and stem not in stems:
                captions.add(prefix + name)
            elif kind in UNREAD_IMAGES:
                images.add(prefix + name)
            elif kind in UNREAD_VIDEOS:
                others.add(prefix + name)
            elif is_image and kind in VIDEOS:
                videos.add(prefix + name)
    lines = []
    if repeats:
        lines.append(
            f"folder names such as {repeats!r} are not read as repeats and captions: use "
            "repeats of a [[dataset]], --default_caption or --trigger_word"
        )
    if parts.number:
        what = f"{parts.are('mask, control image or Live Photo')} not read, such as"
        lines.append(f"{what} {_shown(parts.first)}: a table gives them a column")
    if captions.number:
        thing = "image" if is_image else "image or video"
        many = (
            "1 caption has"
            if captions.number == 1
            else f"{captions.number} captions have"
        )
        lines.append(f"{many} no {thing}, such as {_shown(captions.first)}")
    for count, wanted in ((images, "PNG or JPEG"), (others, "MP4")):
        if count.number:
            them = "it" if count.number == 1 else "them"
            what = f"{count.are('file')} of a kind that is not read, such as"
            lines.append(f"{what} {_shown(count.first)}; convert {them} to {wanted}")
    if videos.number:
        what = f"{videos.are('video')} not read: the variant reads images"
        lines.append(what)
    return lines


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
    if not hidden:
        return ""
    count = _Count(len(hidden), min(hidden))
    return f"{count.are('captioned file')} not in it, such as {_shown(count.first)}"


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


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)


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
