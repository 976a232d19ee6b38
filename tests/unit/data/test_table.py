"""Faults of tables are listed with their places, whatever rows and columns are chosen."""

from pathlib import Path

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import Fault, Table
from dstrain.data.table import TableRows, name_fault, refuse

PATH = Path("photos/m.csv")


def table_of(values: list[str], faults: list[Fault]) -> Table:
    """Return a table of one column `a` whose rows are on lines 2, 3, ..."""
    rows = TableRows()
    rows.columns = ("a",)
    for value in values:
        rows.append([value])
    lines = np.arange(2, 2 + len(values))
    return Table(PATH, ("a",), rows, lines, faults)


def test_fifty_faults_are_listed_and_the_others_counted() -> None:
    table = table_of(["x"] * 53, [Fault(row, "", "is bad") for row in range(53)])
    with pytest.raises(UsageError) as caught:
        table.refuse(table.faults)
    assert caught.value.what == "53 bad rows"
    assert len(caught.value.help_lines) == 51
    assert caught.value.help_lines[49] == "m.csv:51: is bad"
    assert caught.value.help_lines[50] == "and 3 more"


def test_no_fault_is_no_error() -> None:
    refuse(PATH, "row", [])


def test_rows_that_are_chosen_keep_their_lines_and_faults() -> None:
    table = table_of(["x", "y", "z"], [Fault(0, "a", "is bad"), Fault(2, "a", "too")])
    chosen = table.chosen(np.array([2, 1]))
    assert [dict(row) for row in chosen.rows] == [{"a": "z"}, {"a": "y"}]
    assert chosen.faults == [Fault(0, "a", "too")]
    assert chosen.where(0, "a") == "m.csv:4:a"


def test_renamed_columns_are_named_as_in_the_file() -> None:
    table = table_of(["x"], [Fault(0, "a", "is bad")]).renamed({"prompt": "a"})
    assert table.columns == ("prompt",)
    assert dict(table.rows[0]) == {"prompt": "x"}
    assert [fault.column for fault in table.faults] == ["prompt"]
    assert table.where(0, "prompt") == "m.csv:2:a"


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        ("a/" * 1000 + "b.png", True),
        ("é" * 255, True),
        ("é" * 256, False),
        ("a/" * 2048 + "b", False),
        ("é/" * 1400, False),
        ("/9j/4AAQSkZJRgABAQ" * 40_000, False),
        ("https://a.example/" + "x" * 4000, True),
        ("https://a.example/" + "x" * 9000, False),
    ],
)
def test_what_no_file_can_be_called_is_no_name_and_is_not_shown(
    name: str, is_name: bool
) -> None:
    said = "" if is_name else f"is not a file name ({len(name):,} characters)"
    assert name_fault(name) == said
