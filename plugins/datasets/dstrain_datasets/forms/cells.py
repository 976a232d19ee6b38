"""What the cells of a parquet or an arrow file are, by the types of their columns."""

import math
from collections.abc import Callable
from typing import Any

from dstrain.plugin import Content, FormCell, UsageError

Convert = Callable[[Any], FormCell]
"""Turns a value into a cell; raises ValueError that says what is wrong."""


def is_embedded(kind: Any) -> bool:
    """Return whether a column of this `pyarrow.DataType` may have files in it."""
    import pyarrow as pa

    kind = _item(kind)
    return _is_bytes(kind) or (
        pa.types.is_struct(kind)
        and any(_is_bytes(kind.field(at).type) for at in range(kind.num_fields))
    )


def converter(name: str, kind: Any, is_file: bool) -> Convert:
    """Return what turns the values of a column into cells.

    Raises UsageError for a type that no input can be read from.

    Args:
        name: The column.
        kind: Its type, a `pyarrow.DataType`.
        is_file: Whether its cells name files, or have files in them.
    """
    import pyarrow as pa

    item = _item(kind)
    convert: Convert
    has_path = pa.types.is_struct(item) and item.get_field_index("path") >= 0
    if is_file and (has_path or is_embedded(item)):
        convert = _file
    elif pa.types.is_floating(item):
        convert = _number
    elif _is_plain(item):
        convert = _text
    else:
        wanted = "a file, or names a file" if is_file else "text or numbers"
        raise UsageError(name, f"is a column of {kind}; expected {wanted}")
    if item is kind:
        return lambda value: "" if value is None else convert(value)
    return lambda value: _list(value, convert)


def _item(kind: Any) -> Any:
    """Return the type of the values of a list; of any other type, that type."""
    import pyarrow as pa

    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind)
    is_list = is_list or types.is_fixed_size_list(kind)
    return kind.value_type if is_list else kind


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
    )


def _is_plain(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    return any(
        fits(kind)
        for fits in (
            *(types.is_string, types.is_large_string, types.is_string_view),
            *(types.is_integer, types.is_boolean, types.is_decimal, types.is_null),
        )
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"is {value}, which is not a number")
    return repr(value)


def _list(value: Any, convert: Convert) -> FormCell:
    cells: list[str | Content] = []
    for one in value or ():
        if one is None:
            raise ValueError("has a null in its list")
        cell = convert(one)
        cells.append(cell if isinstance(cell, str | Content) else "")
    return cells if cells else ""


def _file(value: Any) -> str | Content:
    """Return the cell of a file: as `datasets` has it, a record of its bytes and its path,
    of which one may be absent; or its bytes alone.
    """
    name = ""
    if isinstance(value, dict):
        path = value.get("path")
        name = path if isinstance(path, str) else ""
        value = value.get("bytes")
    return name if value is None else Content(lambda: (value,), name)
