"""Read the rows of files by the form of a plugin: what it raises gets its place, and the
contents that it yields are kept as files, each once under the digest of its bytes, or of
its URL.
"""

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from dstrain.console import shown
from dstrain.data.faults import raise_system_fault
from dstrain.data.table import (
    DIGEST,
    EMBEDDED_FILES,
    Fault,
    RawValue,
    Table,
    TableRows,
    name_fault,
    text_fault,
)
from dstrain.data.tables.finding import refuse_unread
from dstrain.data.tables.form import URL, Content, Form, Source
from dstrain.errors import DstrainError, SystemFault, UsageError
from dstrain.installed import NamingPlugin
from dstrain.storage import check_writable, replacing, sha256
from dstrain.storage.file_memory import VARIABLE, user_cache

MOST_BYTES = 2**31
"""Bytes of an embedded file."""
SUFFIX = re.compile(r"\.[a-z0-9]{1,5}")
T = TypeVar("T")


def file_columns(source: Source) -> Table:
    """Return the table of files without its rows.

    Raises UsageError for a file that is damaged, or has other columns than the first.
    """
    return Table(source.path, _columns(source), TableRows(), (), form=source.in_words)


def read_files(source: Source, wanted: Mapping[str, bool]) -> Table:
    """Read these columns of files; contents are written to the user's folder.

    wanted: Columns, and whether their cells name files, or are files.
    """
    form = _form_of(source)
    columns = _columns(source)
    used = {name: wanted[name] for name in columns if name in wanted}
    rows = TableRows()
    rows.columns = list(used)
    faults: list[Fault] = []
    starts: list[int] = []
    contents = _Contents()
    for file in source.files:
        starts.append(len(rows))
        for cells, reasons in _rows(source, file, used, contents):
            faults += [
                Fault(len(rows), name, reason) for name, reason in reasons.items()
            ]
            rows.append(cells)
    lines = np.arange(1, len(rows) + 1)
    return Table(
        source.path,
        columns,
        rows,
        lines,
        faults,
        name_place=_Places(source.files, tuple(starts)),
        advice=form.advice if any(wanted[fault.column] for fault in faults) else (),
        form=source.in_words,
        roots=() if contents.folder is None else (contents.folder,),
    )


def texts_in(source: Source) -> Iterator[str]:
    """Yield every text in the files of a source."""
    form = _form_of(source)
    for file in source.files:
        yield from _guarded(form, file, form.texts)


def fetch(url: str, forms: Sequence[Form]) -> Path:
    """Return the file that a URL names, fetched by a form unless it was kept.

    Raises UsageError if the file cannot be fetched as a whole, or no form opens it, and
    SystemFault if its folder cannot be written.
    """
    url = url.strip()
    # A form of some URLs comes before one of any.
    for form in sorted(forms, key=lambda one: URL in one.reads):
        with NamingPlugin(form.plugin, f"its form {form.name}, at {shown(url)},"):
            content = form.open(url)
        if content is not None and form.keeps is not None:
            return _fetched(url, content, form.keeps)
    refuse_unread(url, URL, forms)
    raise UsageError(url, "is a URL that no plugin opens")


def _fetched(url: str, content: Content, folder: Path) -> Path:
    name = hashlib.sha256(url.encode()).hexdigest() + _suffix(urlsplit(url).path)
    path = folder / name
    if path.is_file() and not path.is_symlink():
        return path
    # Two threads may fetch one URL, for two columns: the last one wins, with the
    # same bytes.
    try:
        with replacing(path) as building, building.open("wb") as file:
            for chunk in content.open():
                file.write(chunk)
    except DstrainError:
        raise
    except Exception as error:
        raise UsageError(shown(url), f"cannot be downloaded: {error}") from error
    return path


def _suffix(name: str) -> str:
    """Return the ending of a name where it is a short one, else ''."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if SUFFIX.fullmatch(suffix) else ""


def _form_of(source: Source) -> Form:
    assert source.reader is not None  # it was found by one
    return source.reader


@dataclass(frozen=True)
class _Places:
    """Names rows by their files, and their numbers in these from 1."""

    files: tuple[Path, ...]
    starts: tuple[int, ...]
    """The first row of each file."""

    def __call__(self, row: int, column: str) -> str:
        number = bisect_right(self.starts, row) - 1
        place = f"{self.files[number].name}:{row - self.starts[number] + 1}"
        return f"{place}:{column}" if column else place


class _Contents:
    """Writes embedded files to the user's folder of them, which is made with the first."""

    folder: Path | None = None

    def keep(self, content: Content) -> str:
        """Return the path of the file with these bytes, which is written unless it is
        there; raises ValueError for a large one, and SystemFault.
        """
        if self.folder is None:
            self.folder = embedded_folder()
            check_writable(self.folder)
        if DIGEST.fullmatch(content.digest):
            known = self._path(self.folder, content.digest, content.name)
            if _is_whole(known):
                return str(known)
        data = b""
        for chunk in _chunks(content):
            data = data + chunk if data else chunk
            if len(data) > MOST_BYTES:
                raise ValueError(f"has a file of more than {MOST_BYTES:,} bytes")
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(self.folder, digest, content.name)
        if not _is_whole(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path, len(data)) as building:
                building.write_bytes(data)
        return str(path)

    def _path(self, folder: Path, digest: str, name: str) -> Path:
        # Many files in one folder are slow on some file systems.
        return folder / digest[:2] / f"{digest}{_suffix(name)}"


def embedded_folder() -> Path:
    """Return the folder of embedded files; raises UsageError for a user without a home."""
    folder = user_cache()
    if folder is None:
        what = "is not set, and there is no home folder: embedded files need a place"
        raise UsageError(VARIABLE, what, f"set {VARIABLE} to a folder")
    return Path(os.path.realpath(folder)) / EMBEDDED_FILES


def _chunks(content: Content) -> Iterator[bytes]:
    """Yield the bytes of a content; raise ValueError for one that is damaged."""
    try:
        yield from content.open()
    except (DstrainError, ValueError, OSError, MemoryError):
        raise
    except Exception as error:  # libraries say so by errors of any kind
        raise ValueError(f"cannot be read: {error}") from error


def _is_whole(path: Path) -> bool:
    """Return whether an embedded file is there, with the bytes that its name says.

    Its size says little: a disk may lose what is in a file, and training would not see it.
    """
    if path.is_symlink() or not path.is_file():
        return False
    try:
        return sha256(path) == path.name.partition(".")[0]
    except OSError:
        return False


def _rows(
    source: Source, file: Path, columns: Mapping[str, bool], contents: _Contents
) -> Iterator[tuple[list[RawValue], dict[str, str]]]:
    """Yield the cells of each row of a file, and what is wrong with them by column."""
    form = _form_of(source)

    def one(cell: str | Content | ValueError, is_file: bool) -> str:
        if isinstance(cell, str):
            if fault := (name_fault(cell) if is_file else "") or text_fault(cell):
                raise ValueError(fault)
            return cell
        if isinstance(cell, Content):
            return contents.keep(cell)
        if isinstance(cell, ValueError):
            raise cell
        what = f"form {form.name} of {form.plugin} gave a cell that is a {type(cell).__name__}"
        raise UsageError(file, what)

    for row in _guarded(form, file, form.rows, columns):
        cells: list[RawValue] = []
        reasons = {}
        for name, is_file in columns.items():
            cell = row.get(name, "")
            try:
                if isinstance(cell, list):
                    cells.append([one(item, is_file) for item in cell] or "")
                else:
                    cells.append(one(cell, is_file))
            except ValueError as error:
                cells.append("")
                reasons[name] = str(error)
        yield cells, reasons


def _columns(source: Source) -> tuple[str, ...]:
    """Return the columns of files, which must have the same ones."""
    form = _form_of(source)
    first: tuple[str, ...] = ()
    for file in source.files:
        with _named(form, file):
            names = tuple(form.columns(file))
        first = first or names
        lacking = [name for name in first if name not in names]
        if lacking or len(names) > len(first):
            others = ", ".join(lacking or [one for one in names if one not in first])
            what = f"has other columns than {source.files[0].name}: {others}"
            raise UsageError(file, what)
    return first


def _guarded(
    form: Form, file: Path, read: Callable[..., Iterator[T]], *given: Any
) -> Iterator[T]:
    with _named(form, file):
        yield from read(file, *given)


@contextmanager
def _named(form: Form, file: Path) -> Iterator[None]:
    """Name the file in what its form raises, and tell faults of the machine."""
    try:
        if not S_ISREG(file.stat().st_mode):
            raise UsageError(file, "is not a regular file")
        yield
    except DstrainError:
        raise
    except Exception as error:
        raise_system_fault(file, error)
        if isinstance(error, FileNotFoundError):
            raise UsageError(file, "no such file") from error
        if isinstance(error, OSError) and error.errno is not None:
            raise SystemFault(file, f"cannot be read: {error}") from error
        # Of a damaged file: libraries say so by errors of any kind.
        reason = str(error).partition("\n")[0] or type(error).__name__
        what = f"cannot be read as {form.name} by {form.plugin}: {reason}"
        raise UsageError(file, what) from error
