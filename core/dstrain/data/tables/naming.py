"""Find the columns of a table that are a variant's under another name."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from dstrain.errors import UsageError, nearest
from dstrain.graph import Column, Input

FILE_NAME = "file_name"
TEXT = "text"
ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"file": (FILE_NAME,), "text": (TEXT, "caption")}
)
"""Columns that stand for a variant's first column of files, or of texts, where a table
lacks that: those of Hugging Face's imagefolder, then what others call them.
"""
FLAG = "--column"
NO_CHOICES: Mapping[str, str] = MappingProxyType({})


def parse_columns(parts: Sequence[str]) -> dict[str, str]:
    """Parse INPUT=COLUMN,...: input -> column of the table.

    Raises UsageError for a part of another form, and for an input, or a column, that is
    named twice.
    """
    found: dict[str, str] = {}
    for part in (one for text in parts for one in text.split(",")):
        name, equals, column = (word.strip() for word in part.partition("="))
        if not (name and equals and column):
            what = f"expected INPUT=COLUMN, got {part.strip()!r}"
            raise UsageError(FLAG, what, "such as prompt=text")
        if name in found:
            what = f"{name} is given twice, as {found[name]!r} and {column!r}"
            raise UsageError(FLAG, what)
        if column in found.values():
            raise UsageError(FLAG, f"column {column!r} is given to two inputs")
        found[name] = column
    return found


def other_names(
    columns: Collection[str],
    inputs: Mapping[str, Input],
    choices: Mapping[str, str] = NO_CHOICES,
) -> dict[str, str]:
    """Return the variant's column -> the column of the table that is read for it, where
    that has another name.

    choices: What --column says, by the name of an input or of its column.

    Raises UsageError for a choice of an input, or of a column, that does not exist.
    """
    own = {name: one.name for name, one in inputs.items() if isinstance(one, Column)}
    known = {**{column: column for column in own.values()}, **own}
    found: dict[str, str] = {}
    for name, column in choices.items():
        if name not in known:
            what = f"no input is read from a column {name!r}{nearest(name, known)}"
            raise UsageError(FLAG, what, f"columns: {', '.join(dict.fromkeys(known))}")
        if column not in columns:
            what = f"the dataset has no column {column!r}{nearest(column, columns)}"
            raise UsageError(FLAG, what, f"columns: {', '.join(columns)}")
        found[known[name]] = column
    taken = {*own.values(), *found.values()}
    for column, aliases in _aliases(inputs):
        if column not in columns and column not in found:
            free = [one for one in aliases if one in columns and one not in taken]
            if free:
                found[column] = free[0]
    return {name: column for name, column in found.items() if name != column}


def main_column(inputs: Mapping[str, Input], is_file: bool) -> Column | None:
    """Return the first column of files, or of texts, that a variant's dataset has to
    have.
    """
    for one in inputs.values():
        if isinstance(one, Column) and not one.optional:
            is_text = one.kind in ("text", "texts")
            if one.is_file if is_file else is_text:
                return one
    return None


def _aliases(inputs: Mapping[str, Input]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the columns that may have another name, each with these names."""
    for kind, aliases in ALIASES.items():
        column = main_column(inputs, kind == "file")
        if column is not None:
            yield column.name, aliases
