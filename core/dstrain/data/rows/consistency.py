"""Check the cells of one row against each other, before anything is decoded."""

from collections.abc import Iterator, Mapping
from typing import Any

from dstrain.console import number_of
from dstrain.data.cells import Cell
from dstrain.data.table import Fault
from dstrain.graph.inputs import Column


def inconsistencies(
    number: int, cells: Mapping[str, Cell], columns: Mapping[str, Column]
) -> Iterator[Fault]:
    """Yield what does not fit together in a row; what is blank or bad by itself is left to
    other checks.

    Args:
        number: The row's.
        cells: The inputs that can be used.
        columns: Theirs, by name.
    """
    for name, cell in cells.items():
        column = columns[name]
        for reason in (
            _wrong_count(cell, column, cells, columns),
            _sizes(cell, column),
        ):
            if reason:
                yield Fault(number, column.name, reason)


def _wrong_count(
    cell: Cell,
    column: Column,
    cells: Mapping[str, Cell],
    columns: Mapping[str, Column],
) -> str:
    """Say that a list has another number of entries than its column declares."""
    wanted = column.entries
    if wanted is None or wanted.of not in cells:
        return ""
    other = _value(cells[wanted.of])
    is_number = isinstance(other, int)
    expected = wanted.more + (other if is_number else len(other))
    found = len(_value(cell))
    if found == expected:
        return ""
    verb = "is" if is_number else "has"
    said = f"has {number_of(found, 'entry', 'entries')}, and {columns[wanted.of].name} {verb} "
    said += f"{expected - wanted.more}"
    return f"{said}: expected {number_of(expected, 'entry', 'entries')}"


def _sizes(cell: Cell, column: Column) -> str:
    """Say that the images of a list are loaded at several sizes where one is needed."""
    sizes = dict.fromkeys(shape[1:] for shape in cell.shapes)
    if not column.same_size or len(sizes) < 2:
        return ""
    several = ", ".join(f"{height} x {width}" for height, width in sizes)
    return f"has images of several sizes: {several} (height x width); expected one"


def _value(cell: Cell) -> Any:
    """Return the value of a cell, of files their names."""
    return cell.files or cell.literal
