"""Columns and cells that a run cannot do without."""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import MappingProxyType

from dstrain.data.metadata import Table
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column, Input, Measured

CheckInputs = Callable[[frozenset[str], tuple[str, ...]], object]
"""Raises UsageError where a run cannot do with these inputs of a table with these columns."""
FOREIGN_NAMES = MappingProxyType(
    {
        "prompt": ("caption", "text"),
        "image": ("file_name", "file"),
        "video": ("video_path", "file_name", "file"),
    }
)
"""Column -> what other tools call it."""


def required_columns(
    table: Table,
    columns: Mapping[str, Column],
    inputs: Mapping[str, Input],
    check_inputs: CheckInputs | None,
) -> Callable[[frozenset[str]], Collection[str]]:
    """Return a function: the blank inputs of a row -> those of them that the run needs.

    Raises UsageError if the table lacks a column that the run needs.
    """
    if check_inputs is None:
        return lambda blank: ()

    def problem(blank: Collection[str]) -> UsageError | None:
        given = columns.keys() - set(blank)
        measured = {
            name
            for name, source in inputs.items()
            if isinstance(source, Measured) and source.of in given
        }
        try:
            check_inputs(frozenset(given | measured), table.columns)
        except UsageError as error:
            return error
        return None

    error = problem(())
    if error is not None:
        # A column may be absent because only bad rows have it.
        table.refuse(table.faults)
        advice = _advice(table, inputs, error.what)
        raise UsageError(error.where, error.what, *error.help_lines, *advice) from error

    @cache
    def missing(blank: frozenset[str]) -> list[str]:
        if problem(blank) is None:
            return []
        return [name for name in columns if name in blank and problem((name,))]

    return missing


def _advice(table: Table, inputs: Mapping[str, Input], problem: str) -> list[str]:
    """Name the columns of a table, and those of them that stand for an absent one, if
    the problem quotes one.
    """
    columns = (source for source in inputs.values() if isinstance(source, Column))
    names = dict.fromkeys(column.name for column in columns)
    absent = [
        name for name in names if name not in table.columns and repr(name) in problem
    ]
    if not absent:
        return []
    advice = [f"columns: {', '.join(map(repr, table.columns))}"]
    for name in absent:
        for other in FOREIGN_NAMES.get(name, ()):
            if other in table.columns:
                advice.append(f"rename column {other!r} to {name!r}")
    return advice
