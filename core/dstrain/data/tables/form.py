"""What a form of datasets is: it finds the rows of a dataset, and reads them from files."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dstrain.config.options import Hub

ID, URL = "id", "URL"
"""What a form may read beside endings of files: ids of published datasets, and URLs."""


@dataclass(frozen=True)
class Content:
    """A file that is no file of this machine: a row has it in it, or a URL names it."""

    open: Callable[[], Iterable[bytes]]
    """Yields its bytes, in one piece or in several; raises ValueError that says why it cannot.
    That of a row is called before the next row is asked for."""
    name: str = ""
    """What it was called, for the ending of its name."""
    digest: str = ""
    """The sha256 of its bytes, where that is known: one that was kept is not opened again."""


FormCell = str | Content | ValueError | list[str | Content]
"""Text, the name of a file, a file, a list of these, or what is wrong; '' is an absent cell."""
FormRow = Mapping[str, FormCell]
"""The cells of a row by column; a column left out is an absent cell."""


@dataclass(frozen=True)
class Given:
    """What a user names as a dataset."""

    path: Path
    """A file or a folder; with `is_id`, the id of a published dataset."""
    option: str = "--dataset"
    """How the options begin that name it: with `_base_path` or `_metadata_path` behind it."""
    is_id: bool = False
    """Whether there is no such file or folder, and it may be an id."""
    hub: Hub | None = None
    """The hub that is asked for; None for the usual one."""
    is_needed: bool = True
    """Whether its rows are read: a stage 2 does without them."""
    may_fetch: bool = True
    """Whether something may be downloaded."""


@dataclass(frozen=True)
class Source:
    """Where the rows of a dataset are, and in which form."""

    form: str
    """'table', 'folder' (with captions), 'several', or the name of a plugin's form."""
    path: Path
    """The file of the table; the folder, where it is not one file."""
    base: Path
    """The folder in which the files are that rows name."""
    files: tuple[Path, ...] = ()
    """The files that a plugin's form reads, in the order of their rows."""
    left_out: tuple[str, ...] = ()
    """Splits beside that of the files, which are not read."""
    roots: tuple[Path, ...] = ()
    """Folders beside `base` that links in a folder may lead to."""
    parts: tuple["Source", ...] = ()
    """The sources of several datasets; `path` and `base` are of the first one."""
    reader: "Form | None" = field(default=None, compare=False)
    """The form of a plugin, which reads `files`; found by its name."""

    @property
    def has_contents(self) -> bool:
        """Return whether rows may have files in them."""
        return self.reader is not None or any(part.has_contents for part in self.parts)

    @property
    def in_words(self) -> str:
        """Return the form in words."""
        if self.form == "table":
            return self.path.name
        if self.form == "folder":
            return "folder with captions"
        if self.form == "several":
            return f"{len(self.parts)} datasets"
        if self.path.is_file():
            return f"{self.form} file"
        return f"{len(self.files)} {self.form} file{'s' * (len(self.files) > 1)}"

    def digest(self) -> str:
        """Return the digest of the rows: of all that they are read from, but for the files
        that they name. It is that of the folder's content, wherever the folder is.

        Raises DstrainError for what cannot be read, and OSError.
        """
        # Here, since modules of hooks are imported for every command: these import numpy.
        from dstrain.data.tables.listing import folder_digest
        from dstrain.storage import hash_json, sha256
        from dstrain.storage.file_digests import ModelDigests

        if self.form == "table":
            return sha256(self.path)
        if self.form == "folder":
            return folder_digest(self.path, self.roots)
        if self.form == "several":
            return hash_json("datasets", [part.digest() for part in self.parts])
        digests = ModelDigests()
        found = [[file.name, digests.of(file)] for file in self.files]
        digests.save()
        return found[0][1] if self.path.is_file() else hash_json(self.form, found)


class Form:
    """A form of datasets that a plugin adds by `dstrain_forms`; it is asked for what is
    neither a table of metadata nor a folder with captions.

    Core opens paths, keeps contents as files, and names the file and the row in what is
    raised; a form opens what is its own.
    """

    plugin: str = "dstrain"
    """The plugin that it is of, as errors name it; set by dstrain."""
    name = ""
    """What --dataset_form calls it."""
    reads: tuple[str, ...] = ()
    """Endings of the files that it reads, such as '.zip'; `ID`, `URL`."""
    keeps: Path | None = None
    """The folder in which files are kept that `open` opens; None keeps none."""
    advice: tuple[str, ...] = ()
    """What to do about cells that name no file."""

    def find(self, given: Given) -> Source | Path | None:
        """Return where the rows are, None for what is of another form; or the folder or file
        of this machine that stands for it, which all forms are asked for then.

        Raises UsageError for what is of this form, and cannot be read as it is.
        """
        return None

    def columns(self, file: Path) -> Mapping[str, bool]:
        """Return the columns of a file, and whether their cells may be contents."""
        raise NotImplementedError

    def rows(self, file: Path, columns: Mapping[str, bool]) -> Iterator[FormRow]:
        """Yield the rows of a file; only one of them need be in RAM.

        Args:
            file: One of the files of a source.
            columns: Those that are used, and whether their cells are files.
        """
        raise NotImplementedError

    def texts(self, file: Path) -> Iterator[str]:
        """Yield every text in a file, in which a secret might stand."""
        for row in self.rows(file, dict.fromkeys(self.columns(file), True)):
            for cell in row.values():
                for one in cell if isinstance(cell, list) else (cell,):
                    yield one.name if isinstance(one, Content) else str(one)

    def open(self, name: str) -> Content | None:
        """Return the file that a URL names; None for a URL of another kind.

        Raises UsageError for one that is not opened, such as without `keeps`.
        """
        return None
