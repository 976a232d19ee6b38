"""Read a folder of images or videos, with a file for the caption of each, as a table."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from dstrain.data.faults import raise_system_fault
from dstrain.data.table import Fault, RawValue, Table, TableRows
from dstrain.data.tables.listing import (
    Medium,
    folder_digest,
    leads_out,
    list_media,
    printable,
    read_beside,
    read_caption,
    read_for,
)
from dstrain.data.tables.naming import FILE_NAME, TEXT
from dstrain.errors import UsageError
from dstrain.graph import Column

CAPTION = "\0caption"
"""The column of the file that a caption is from, which no table shows."""
READERS = 16
"""Threads that read captions: more than processors, since they wait for the disk."""
AT_ONCE = 2048
CAPTIONS_PER_TASK = 64
NONE = "has no caption"
ADVICE = (
    "there is no metadata, so captions are read from files beside the images and videos",
    "to use one caption for all images and videos without a caption, give --default_caption TEXT",
)


def folder_columns(folder: Path) -> Table:
    """Return the table of a folder without its rows."""
    return _table(folder, TableRows(), ())


def read_folder(
    folder: Path,
    column: Column | None,
    default_caption: str | None,
    roots: Sequence[Path] = (),
) -> Table:
    """Read a folder: a row for each image or video, with its name and its caption.

    What is wrong with captions is among the faults of the table. Raises UsageError for a
    folder without images or videos, or with a link to another folder; SystemFault.

    Args:
        column: What the files are read for; for an image, videos are left out.
        default_caption: The caption of those without one; None makes that a fault.
        roots: Other folders that a link may lead to.
    """
    digest = folder_digest(folder, roots)
    suffixes = read_for(column)
    rows = TableRows()
    faults: list[Fault] = []
    is_list = column is not None and column.kind == "images"
    media = list_media(folder, suffixes)
    found = _with_captions(media, (folder, *roots), default_caption)
    for row, (medium, caption) in enumerate(found):
        name: RawValue = [medium.name] if is_list else medium.name
        rows.append([name, caption.text, caption.file])
        if caption.fault:
            faults.append(Fault(row, TEXT, caption.fault))
    if not len(rows):
        raise UsageError(folder, "has videos, but no image")
    return _table(folder, rows, faults, digest)


def _table(
    folder: Path, rows: TableRows, faults: Sequence[Fault], digest: str = ""
) -> Table:
    rows.columns = (FILE_NAME, TEXT, CAPTION)
    lines = np.arange(1, len(rows) + 1)
    return Table(
        folder,
        (FILE_NAME, TEXT),
        rows,
        lines,
        faults,
        name_place=_Places(rows),
        advice=ADVICE if any(NONE in fault.reason for fault in faults) else (),
        digest=digest,
        form="folder with captions",
    )


@dataclass(frozen=True)
class _Places:
    """Names rows by their files."""

    rows: Sequence[Mapping[str, RawValue]]

    def __call__(self, row: int, column: str) -> str:
        cells = self.rows[row]
        file = cells[CAPTION] if column == TEXT else ""
        name = file or cells[FILE_NAME]
        return printable(name if isinstance(name, str) else name[0])


@dataclass(frozen=True, slots=True)
class _Caption:
    """The caption of an image or a video."""

    text: str = ""
    file: str = ""
    """The file that it is in, '' for none."""
    fault: str = ""


def _with_captions(
    media: Iterator[Medium], folders: Sequence[Path], default: str | None
) -> Iterator[tuple[Medium, _Caption]]:
    """Yield each image and video with its caption.

    folders: It, and others that a link may lead to.
    """

    def read(task: Sequence[Medium]) -> list[_Caption]:
        return [_caption_of(medium, folders, default) for medium in task]

    with ThreadPoolExecutor(READERS) as threads:
        while part := list(islice(media, AT_ONCE)):
            starts = range(0, len(part), CAPTIONS_PER_TASK)
            tasks = (part[at : at + CAPTIONS_PER_TASK] for at in starts)
            yield from zip(part, chain(*threads.map(read, tasks)), strict=True)


def _caption_of(
    medium: Medium, folders: Sequence[Path], default: str | None
) -> _Caption:
    """Return the caption of an image or a video; what is wrong with it is its fault."""
    found: list[_Caption] = []
    for file in medium.captions:
        caption = _in_file(file, folders)
        if caption.fault:
            return caption
        if caption.text:
            found.append(caption)
    if len(found) > 1:
        files = " and ".join(printable(one.file) for one in found)
        return _Caption(fault=f"has two captions, in {files}: remove one of them")
    if found and medium.twins:
        names = " and ".join(map(printable, medium.twins))
        what = f"is the caption of {printable(medium.name)} and of {names}"
        return _Caption("", found[0].file, f"{what}: give each a name of its own")
    if found:
        return found[0]
    if default is not None:
        return _Caption(default)
    if medium.captions:
        return _Caption("", medium.captions[0], f"{NONE} in it")
    name = printable(f"{Path(medium.name).stem}.txt")
    return _Caption("", "", f"{NONE}, such as {name}")


def _in_file(file: str, folders: Sequence[Path]) -> _Caption:
    path = folders[0] / file
    try:
        if leads_out(path, folders):
            # It may lead to anything that this user can read.
            what = f"points outside the dataset's folder, to {path.readlink()}"
            return _Caption("", file, what)
        return _Caption(read_caption(path), file)
    except UsageError as error:
        return _Caption("", file, error.what)
    except ValueError as error:
        return _Caption("", file, str(error))
    except OSError as error:
        raise_system_fault(path, error)
        return _Caption("", file, f"cannot be read: {error.strerror}")


def folder_texts(folder: Path, roots: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the names of images and videos in a folder, and the files of their captions as
    text, whatever is in them.

    roots: Other folders that a link may lead to.
    """
    for medium in list_media(folder):
        yield medium.name
        for file in medium.captions:
            data = read_beside(folder, file, roots)
            if data is not None:
                yield data.decode(errors="replace")
