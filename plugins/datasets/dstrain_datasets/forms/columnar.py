"""Read parquet files, and the arrow files of `datasets`: batch by batch, and only the columns
that are used.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dstrain.plugin import Form, FormCell, FormRow, Given, Source, UsageError

from dstrain_datasets.forms.cells import Convert, converter, is_embedded
from dstrain_datasets.forms.columnar_files import (
    ARROW,
    PARQUET,
    find_parquet,
    find_saved,
)

ROWS_AT_ONCE = 1024
"""Rows whose cells are objects of Python at once."""
FILES_AT_ONCE = 16
"""Rows with embedded files that are in RAM at once."""
EMBED = (
    "embed images as bytes, or as records of bytes and path: text is read as the name of a "
    "file (base64.b64decode turns base64 text into bytes)"
)
Batches = Iterator[Any]
"""`pyarrow.RecordBatch` by `pyarrow.RecordBatch`."""


class Columnar(Form):
    """What both kinds of files have in common."""

    advice = (EMBED,)

    def columns(self, file: Path) -> Mapping[str, bool]:
        """Return the columns, and whether their cells may be embedded files."""
        schema = _schema(file)
        names = list(schema.names)
        for name in names:
            if names.count(name) > 1:
                raise UsageError(file, f"column name {name!r} appears twice")
        return {field.name: is_embedded(field.type) for field in schema}

    def rows(self, file: Path, columns: Mapping[str, bool]) -> Iterator[FormRow]:
        """Yield the rows; raises UsageError for a column that no input can be read from."""
        kinds = {field.name: field.type for field in _schema(file)}
        convert: dict[str, Convert] = {}
        for name, is_file in columns.items():
            try:
                convert[name] = converter(name, kinds[name], is_file)
            except UsageError as error:
                raise UsageError(f"{file}:{error.where}", error.what) from error
        has_files = any(columns[name] and is_embedded(kinds[name]) for name in columns)
        at_once = FILES_AT_ONCE if has_files else ROWS_AT_ONCE
        for batch in _batches(file, columns, at_once):
            values = [
                _cells(_values(file, batch, name), convert[name]) for name in columns
            ]
            for cells in zip(*values, strict=True):
                yield dict(zip(columns, cells, strict=True))

    def texts(self, file: Path) -> Iterator[str]:
        """Yield every text, with the names of embedded files but not their bytes."""
        columns = _text_leaves(file) if file.suffix == PARQUET else None
        if columns == []:
            return
        for batch in _batches(file, columns):
            for column in batch.columns:
                yield from _texts_of(column)


class Parquet(Columnar):
    """Parquet files."""

    name = "parquet"
    reads = (PARQUET,)

    def find(self, given: Given) -> Source | None:
        """Return a file, or the files in a folder, or in its folder `data`."""
        path = given.path
        if path.is_dir():
            # What was saved there may have such files beside it.
            is_saved = find_saved(path, given.option) is not None
            advice = f"name one with {given.option}_metadata_path"
            return None if is_saved else find_parquet(path, advice)
        return _one_file(self, path)


class Arrow(Columnar):
    """Arrow files, as `save_to_disk` of `datasets` writes them."""

    name = "arrow"
    reads = (ARROW,)

    def find(self, given: Given) -> Source | None:
        """Return a file, or the files that were saved in a folder."""
        path = given.path
        if path.is_dir():
            return find_saved(path, given.option)
        return _one_file(self, path)


def _one_file(form: Form, path: Path) -> Source | None:
    is_one = path.suffix in form.reads
    return Source(form.name, path, path.parent, (path,)) if is_one else None


def _cells(values: list[Any], convert: Convert) -> Iterator[FormCell]:
    """Yield the cells of a column; a ValueError is what is wrong with one."""
    for value in values:
        try:
            yield convert(value)
        except ValueError as error:
            yield error


def _text_leaves(file: Path) -> list[str]:
    """Return the paths of the texts in a parquet file, such as 'image.path'.

    The bytes beside them are not read: they may be megabytes in each of a thousand rows.
    Of an arrow file, which is mapped, nothing is read that is not looked at.
    """
    import pyarrow.parquet as pq

    with _opened(file) as source:
        schema = pq.ParquetFile(source).schema
        leaves = [schema.column(number) for number in range(len(schema))]
    return [
        leaf.path
        for leaf in leaves
        if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "NONE"
    ]


def _texts_of(column: Any) -> Iterator[str]:
    import pyarrow as pa

    types = pa.types
    if types.is_struct(column.type):
        for part in column.flatten():
            yield from _texts_of(part)
    elif hasattr(column, "values") and types.is_nested(column.type):
        yield from _texts_of(column.values)
    elif types.is_dictionary(column.type):
        yield from _texts_of(column.dictionary)
    elif (
        types.is_string(column.type)
        or types.is_large_string(column.type)
        or types.is_string_view(column.type)
    ):
        yield from filter(None, column.to_pylist())


def _values(file: Path, batch: Any, name: str) -> list[Any]:
    try:
        return list(batch.column(name).to_pylist())
    except (UnicodeDecodeError, OverflowError) as error:
        what = f"column {name} has a value that cannot be read: {error}"
        raise UsageError(file, what) from error


def _schema(file: Path) -> Any:
    """Return the `pyarrow.Schema` of a file."""
    import pyarrow.parquet as pq

    with _opened(file) as source:
        if file.suffix == PARQUET:
            return pq.ParquetFile(source).schema_arrow
        return _stream(source).schema


def _batches(
    file: Path, columns: Collection[str] | None, at_once: int = ROWS_AT_ONCE
) -> Batches:
    """Yield the rows of some columns of a file, or of all."""
    import pyarrow.parquet as pq

    with _opened(file) as source:
        if file.suffix == PARQUET:
            names = None if columns is None else list(columns)
            # Without what is to come in RAM: a group of rows may have many images.
            whole = pq.ParquetFile(source, pre_buffer=False)
            yield from whole.iter_batches(at_once, columns=names, use_threads=False)
            return
        for batch in _stream(source):
            part = batch if columns is None else batch.select(list(columns))
            for start in range(0, part.num_rows, at_once):
                yield part.slice(start, at_once)


def _stream(source: Any) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(source)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file for Arrow."""
    import pyarrow as pa

    with pa.memory_map(os.fsencode(file)) as source:
        yield source
