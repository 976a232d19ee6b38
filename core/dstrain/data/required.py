"""Columns and cells that a run cannot do without: the ones lacking are told, with what
they may be called.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import MappingProxyType

from dstrain.data.metadata import Table
from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Input, Measured

CheckInputs = Callable[[frozenset[str], tuple[str, ...]], object]
"""Raises UsageError where a run cannot do with these inputs of a table with these
columns.
"""
FOREIGN = MappingProxyType(
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
    planned: CheckInputs | None,
) -> Callable[[frozenset[str]], Collection[str]]:
    """Tell which of a row's blank inputs the run needs; raises UsageError if columns
    are lacking that it needs.
    """
    if planned is None:
        return lambda blank: ()
    plans = cache(planned)

    def fault(blank: Collection[str]) -> UsageError | None:
        present = set(columns) - set(blank)
        sizes = {
            name
            for name, source in inputs.items()
            if isinstance(source, Measured) and source.of in present
        }
        try:
            plans(frozenset(present | sizes), table.columns)
        except UsageError as error:
            return error
        return None

    if (error := fault(())) is not None:
        refuse_bad_rows(table)
        wanted = [
            source.name for source in inputs.values() if isinstance(source, Column)
        ]
        absent = [
            name
            for name in wanted
            if name not in table.columns and repr(name) in error.what
        ]
        raise UsageError(
            error.where, error.what, *error.help_lines, *_columns_there(table, absent)
        ) from error
    return cache(
        lambda blank: (
            [name for name in columns if name in blank and fault((name,))]
            if fault(blank)
            else []
        )
    )


def refuse_bad_rows(table: Table) -> None:
    """Raise UsageError for the bad rows of a table without a first line of names: a
    column may be lacking for them.
    """
    if table.path.suffix.lower() != ".csv":
        table.refuse(table.faults)


def _columns_there(table: Table, absent: Collection[str]) -> list[str]:
    """The columns of a table that lacks some, and which of them other tools have in the
    place of one.
    """
    foreign = [
        (other, name)
        for name in dict.fromkeys(absent)
        for other in FOREIGN.get(name, ())
    ]
    hints = [
        f"{other!r} is what other tools call it; name it {name!r}"
        for other, name in foreign
        if other in table.columns
    ]
    return (
        [f"columns there: {', '.join(map(repr, table.columns))}", *hints]
        if absent
        else []
    )


def no_columns(table: Table, inputs: Mapping[str, Input]) -> UsageError:
    """What to say of a table none of whose columns is read: often, its first line is
    data.

    Raises UsageError for bad rows, as `refuse_bad_rows` does.
    """
    refuse_bad_rows(table)
    wanted = [source.name for source in inputs.values() if isinstance(source, Column)]
    near = {match for name in table.columns if (match := nearest(name, wanted))}
    hint = f"{table.columns[0]!r}{near.pop()}" if near else ""
    what = f"has no column that this variant reads: {', '.join(dict.fromkeys(wanted))}"
    advice = (
        "the first line names the columns"
        if table.path.suffix.lower() == ".csv"
        else ""
    )
    return UsageError(
        str(table.path),
        what,
        *filter(None, (*_columns_there(table, wanted), hint, advice)),
    )
