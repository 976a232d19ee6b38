"""Tables of rows; cells stay as they are written."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar
from unicodedata import normalize

import numpy as np

from dstrain.console import URL
from dstrain.errors import UsageError
from dstrain.storage import Chosen
from dstrain.storage.lazy_sequences import Lazy, Numbers
from dstrain.storage.spool import Spool

T = TypeVar("T")
MAX_FAULTS_SHOWN = 50
MAX_CELL_LENGTH = 2**20
"""Characters: above any caption or list of files; a longer cell is a quote that was never
closed.
"""
MAX_PATH_LENGTH = 4096
"""Characters of the longest path of Linux, the longest of all systems that name files so."""
MAX_NAME_LENGTH = 255
"""Characters of a file's name in its folder; few file systems take as many."""
RawValue = str | list[str]
"""A cell as written: text, or a list of texts from json. '' is an absent cell."""
NamePlace = Callable[[int, str], str]
"""Names a row, from 0, or a cell of it, where its table is not one file with lines."""
EMBEDDED_FILES = "embedded_files"
"""The folder of files that were embedded in tables, each named by its digest."""
DIGEST = re.compile("[0-9a-f]{64}")
EMBEDDED = "the embedded file"
"""What such a file is called in the message of its row and column."""
_half_pair = re.compile("[\ud800-\udfff]").search


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row, or with one cell of it."""

    row: int
    """The number of the row, from 0."""
    column: str
    """'' for the row as a whole."""
    reason: str


@dataclass(frozen=True)
class Table:
    """Rows of metadata, each with every column that was read."""

    path: Path
    """The file that it was read from; a folder, where it is not one file."""
    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, RawValue]]
    lines: Numbers
    """The first line of each row (csv, jsonl), or its number from 1 (json, and others)."""
    faults: Sequence[Fault] = ()
    """What is wrong with rows. Such a row keeps its place, with '' for what is unreadable."""
    originals: Mapping[str, str] = field(default_factory=dict)
    """Column -> its name in the file, where that is another one."""
    name_place: NamePlace | None = None
    """Names places where rows are not lines of `path`."""
    advice: Sequence[str] = ()
    """What to do about the faults."""
    digest: str = ""
    """The digest of all that it was read from, taken before it was read; '' for one file,
    whose sha256 it is."""
    form: str = ""
    """What kind of dataset it was read from, in words; '' for a file of metadata."""
    roots: tuple[Path, ...] = ()
    """Folders in which files are that were embedded in it."""

    @property
    def names_in_file(self) -> tuple[str, ...]:
        """Return the columns by their names in the file."""
        return tuple(self.originals.get(name, name) for name in self.columns)

    def where(self, row: int, column: str = "") -> str:
        """Name a row, from 0, or a cell of it, for a message: 'metadata.csv:3:prompt'."""
        column = self.originals.get(column, column)
        if self.name_place is not None:
            return self.name_place(row, column)
        place = f"{self.path.name}:{self.lines[row]}"
        return f"{place}:{column}" if column else place

    def refuse(self, faults: Iterable[Fault]) -> None:
        """Raise one UsageError with the place of each fault; do nothing without faults."""
        ordered = sorted(dict.fromkeys(faults), key=lambda fault: fault.row)
        kind = "value" if all(fault.column for fault in ordered) else "row"
        found = []
        for one in ordered:
            place = self.where(one.row, one.column)
            # In a folder the place is the name of the file, which need not be said again.
            found.append((place, one.reason.removeprefix(f"{place!r} ")))
        try:
            lines = [f"{place}: {reason}" for place, reason in found]
            refuse(self.path, kind, lines, self.advice)
        except UsageError as error:
            error.faults = tuple(found)
            raise

    def chosen(self, numbers: Numbers) -> "Table":
        """Return the table of these rows alone, which may have faults."""
        new = (
            {int(row): number for number, row in enumerate(numbers)}
            if self.faults
            else {}
        )
        faults = [
            replace(one, row=new[one.row]) for one in self.faults if one.row in new
        ]
        lines = np.asarray(self.lines, np.int64)[np.asarray(numbers, np.int64)]
        name_place = self.name_place
        if name_place is not None:
            name_place = _ChosenPlaces(name_place, numbers)
        return replace(
            self,
            rows=Chosen(self.rows, numbers),
            lines=lines,
            faults=faults,
            name_place=name_place,
        )

    def renamed(self, originals: Mapping[str, str]) -> "Table":
        """Return the table with new names of columns; messages keep those of the file.

        A column whose name another one gets is left out.

        originals: New name -> the column that gets it.
        """
        if not originals:
            return self
        new = {original: name for name, original in originals.items()}

        def name_of(column: str) -> str:
            # No column of a file has a NUL character in its name.
            is_hidden = column in originals and column not in new
            return f"\0{column}" if is_hidden else new.get(column, column)

        rows = self.rows
        if isinstance(rows, TableRows):
            rows = rows.renamed([name_of(column) for column in rows.columns])
        names = [name_of(column) for column in self.columns]
        return replace(
            self,
            columns=tuple(name for name in names if not name.startswith("\0")),
            rows=rows,
            faults=[replace(one, column=name_of(one.column)) for one in self.faults],
            originals=dict(originals),
        )


@dataclass(frozen=True)
class _ChosenPlaces:
    """Names the places of some of the rows."""

    name_place: NamePlace
    numbers: Numbers

    def __call__(self, row: int, column: str) -> str:
        return self.name_place(int(self.numbers[row]), column)


class Spooled(Lazy[T]):
    """Entries on disk in few bytes each, of which only the one that is looked at is an
    object.
    """

    def __init__(self, entries: Spool | None = None) -> None:
        """Begin without entries, or with these."""
        self.entries = Spool() if entries is None else entries

    def _made(self, entry: Any) -> T:
        """Return the object of an entry."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.entries)

    def one(self, number: int) -> T:
        """Return an object by its number, from 0 on."""
        return self._made(self.entries[number])

    def __iter__(self) -> Iterator[T]:
        """Yield the objects in order."""
        return map(self._made, self.entries)


class TableRows(Spooled[Mapping[str, RawValue]]):
    """Rows of a table; a row has the cells of the first columns, the others are blank."""

    columns: Sequence[str] = ()

    def renamed(self, columns: Sequence[str]) -> "TableRows":
        """Return the same rows with other names of their columns."""
        rows = TableRows(self.entries)
        rows.columns = columns
        return rows

    def append(self, cells: Sequence[RawValue]) -> None:
        """Add a row."""
        self.entries.append(cells)

    def _made(self, entry: list[RawValue]) -> dict[str, RawValue]:
        entry += [""] * (len(self.columns) - len(entry))
        return dict(zip(self.columns, entry, strict=True))


def refuse(
    where: Path, kind: str, faults: Sequence[str], advice: Sequence[str] = ()
) -> None:
    """Raise one UsageError that lists the first 50 faults and counts the others; do
    nothing without faults.

    kind: What is bad, in the singular.
    """
    count = len(faults)
    listed = [*faults[:MAX_FAULTS_SHOWN]]
    if count > MAX_FAULTS_SHOWN:
        listed.append(f"and {count - MAX_FAULTS_SHOWN} more")
    if listed:
        what = f"{count} bad {kind}{'s' * (count > 1)}"
        raise UsageError(where, what, *listed, *advice)


def text_fault(text: str) -> str:
    """Say why a cell is not text that can be read and written; '' if it is."""
    if len(text) > MAX_CELL_LENGTH:
        return f"has {len(text):,} characters; the limit is {MAX_CELL_LENGTH:,}"
    # Text that is ASCII says so at once.
    if not text.isascii() and (found := _half_pair(text)):
        code = ord(found[0])
        if 0xDC80 <= code <= 0xDCFF:  # as a byte is decoded that is no character
            return f"is not UTF-8 text (byte 0x{code - 0xDC00:02x}); save it as UTF-8"
        return f"contains \\u{code:x}, half of a surrogate pair, which is no character"
    if "\0" in text:
        return "contains a NUL character, which is not text"
    return ""


def name_fault(name: str) -> str:
    """Say why no file can have this name; '' if one can, and for a URL.

    What is no name may be a whole file as text: it is not shown.
    """
    longest = max(map(len, name.split("/")))
    if is_url(name) or (longest <= MAX_NAME_LENGTH and len(name) <= MAX_PATH_LENGTH):
        return ""
    return f"is not a file name ({len(name):,} characters)"


def is_url(name: str) -> bool:
    """Return whether the name of a file is a URL of any kind."""
    return URL.match(name) is not None


def unicode_forms(name: str) -> tuple[str, ...]:
    """Return the name of a file as it is written, and with accents joined and apart, as
    systems and archives write them.
    """
    forms = () if name.isascii() else (normalize("NFC", name), normalize("NFD", name))
    return tuple(dict.fromkeys((name, *forms)))


def is_embedded_file(path: str) -> bool:
    """Return whether a path is that of a file that was embedded in a table: its name
    says nothing to a reader, who knows the row and the column.
    """
    name = PurePath(path)
    is_digest = DIGEST.fullmatch(name.stem) is not None
    return is_digest and EMBEDDED_FILES in name.parts[:-1]
