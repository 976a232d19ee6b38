"""Columns and cells that a run cannot do without."""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import MappingProxyType

from dstrain.data.metadata import Table
from dstrain.errors import UsageError, nearest
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
        refuse_bad_rows(table)
        # The error quotes the column that would give what is missing.
        named = [name for name in _column_names(inputs) if repr(name) in error.what]
        absent = [name for name in named if name not in table.columns]
        advice = _advice(table, absent)
        raise UsageError(error.where, error.what, *error.help_lines, *advice) from error

    @cache
    def missing(blank: frozenset[str]) -> list[str]:
        if problem(blank) is None:
            return []
        return [name for name in columns if name in blank and problem((name,))]

    return missing


def _column_names(inputs: Mapping[str, Input]) -> list[str]:
    """Return the columns that a variant has inputs for, each once."""
    columns = (source for source in inputs.values() if isinstance(source, Column))
    return list(dict.fromkeys(column.name for column in columns))


def refuse_bad_rows(table: Table) -> None:
    """Raise UsageError for the bad rows of a json table: a column may be absent because
    only they have it.
    """
    if table.path.suffix.lower() != ".csv":
        table.refuse(table.faults)


def _advice(table: Table, absent: Collection[str]) -> list[str]:
    """Name the columns of a table, and those of them that stand for an absent one."""
    if not absent:
        return []
    advice = [f"columns: {', '.join(map(repr, table.columns))}"]
    for name in absent:
        for other in FOREIGN_NAMES.get(name, ()):
            if other in table.columns:
                advice.append(f"rename column {other!r} to {name!r}")
    return advice


def no_columns(table: Table, inputs: Mapping[str, Input]) -> UsageError:
    """Return the error for a table without any column that the variant reads; often its
    first line is data.

    Raises UsageError for bad rows instead, as `refuse_bad_rows` does.
    """
    refuse_bad_rows(table)
    wanted = _column_names(inputs)
    advice = _advice(table, wanted)
    near = {match for name in table.columns if (match := nearest(name, wanted))}
    if near:
        advice.append(f"{table.columns[0]!r}{near.pop()}")
    if table.path.suffix.lower() == ".csv":
        advice.append("the first line must name the columns")
    what = f"has no column that this variant reads: {', '.join(wanted)}"
    return UsageError(table.path, what, *advice)
