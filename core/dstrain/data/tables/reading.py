"""Read a dataset of any form as a table with a variant's names of columns."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dstrain.data.table import Table
from dstrain.data.tables.folder import folder_columns, folder_texts, read_folder
from dstrain.data.tables.form import Source
from dstrain.data.tables.metadata import read_columns, read_metadata
from dstrain.data.tables.naming import main_column, other_names
from dstrain.data.tables.row_files import file_columns, read_files, texts_in
from dstrain.graph import Column, Input


@dataclass(frozen=True)
class Reading:
    """What the options say of how a dataset is read as a table."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Input -> the column that is read for it, where it is named."""
    default_caption: str | None = None
    """The caption of an image or a video of a folder without one."""
    roots: tuple[Path, ...] = ()
    """Folders beside that of the dataset that may hold files."""

    def read_columns(self, source: Source, inputs: Mapping[str, Input]) -> Table:
        """Return the table of a dataset without its rows, as far as its form lets these
        be left out.
        """
        return self._named(_columns(source), inputs)

    def read(
        self,
        source: Source,
        inputs: Mapping[str, Input],
        wanted: Collection[str] | None = None,
    ) -> Table:
        """Return the table of a dataset.

        Raises UsageError for what is no dataset of this form, and SystemFault. What is
        wrong with single rows is among the faults of the table.

        wanted: The variant's columns that are read, where a form lets others be left
            out; None for all.
        """
        if source.form == "table":
            return self._named(read_metadata(source.path), inputs)
        if source.form == "folder":
            media = main_column(inputs, True)
            table = read_folder(source.path, media, self.default_caption, self.roots)
            return self._named(table, inputs)
        header = _columns(source)
        own = {one.name: one for one in inputs.values() if isinstance(one, Column)}
        others = other_names(header.columns, inputs, self.columns)
        columns = {}
        for name in own.keys() if wanted is None else wanted:
            column = others.get(name, name)
            is_shadowed = column == name and name in others.values()
            if column in header.columns and not is_shadowed:
                columns[column] = own[name].is_file
        return read_files(source, columns).renamed(others)

    def _named(self, table: Table, inputs: Mapping[str, Input]) -> Table:
        return table.renamed(other_names(table.columns, inputs, self.columns))


def _columns(source: Source) -> Table:
    if source.form == "several":
        return _columns(source.parts[0])
    if source.form == "table":
        return read_columns(source.path)
    if source.form == "folder":
        return folder_columns(source.path)
    return file_columns(source)


def texts_of(source: Source) -> Iterator[str]:
    """Yield every text that rows of a folder, or of a plugin's form, are read from."""
    for part in source.parts:
        yield from texts_of(part)
    if source.form == "folder":
        yield from folder_texts(source.path, source.roots)
    elif source.reader is not None:
        yield from texts_in(source)
