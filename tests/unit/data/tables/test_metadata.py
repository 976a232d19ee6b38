"""Metadata is read strictly and kept as written."""

import csv
import json
from pathlib import Path

import pytest
from dstrain.data import Table
from dstrain.data.tables import Reading, find_source
from dstrain.data.tables.metadata import read_metadata

LIMIT = 2**20
"""Characters of a cell."""
LONG = "x" * (LIMIT + 1)
AS_WRITTEN = [
    *("NA", "None", "nan", "null", "0001", "1e3", "1.0", "True", "", " padded "),
    *("#x", "=1+1", "ünï 猫 🐈"),
]


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(folder: Path, name: str, content: str | bytes) -> Table:
    table = read_metadata(written(folder, name, content))
    table.refuse(table.faults)
    return table


def texts(table: Table, column: str) -> list[object]:
    return [row[column] for row in table.rows]


def test_every_cell_is_the_text_that_was_written(tmp_path: Path) -> None:
    records = [{"prompt": text} for text in AS_WRITTEN]
    rows = "".join(f'a.png,"{text}"\n' for text in AS_WRITTEN)
    lines = "\n".join(map(json.dumps, records))
    for name, content in {
        "m.csv": f"image,prompt\n{rows}",
        "m.json": json.dumps(records),
        "m.jsonl": lines,
    }.items():
        assert texts(read(tmp_path, name, content), "prompt") == AS_WRITTEN


def test_numbers_and_booleans_of_json_are_text_as_written(tmp_path: Path) -> None:
    cells = ["1.0", "12345678901234567890", "1e-5", "true", "false", "null"]
    lines = [*(f'{{"a": {cell}}}' for cell in cells), '{"b": 1}']
    table = read(tmp_path, "m.jsonl", "\n".join(lines))
    assert texts(table, "a") == [*cells[:-1], "", ""]
    assert table.columns == ("a", "b")
    # Lists of texts stay lists.
    table = read(tmp_path, "m.json", '[{"images": ["x", "y"]}]')
    assert texts(table, "images") == [["x", "y"]]


@pytest.mark.parametrize("name", ["m.csv", "m.CSV"])
def test_csv_bom_crlf_quotes_newlines_and_commas(tmp_path: Path, name: str) -> None:
    lines = ["image,prompt", 'a.png,"one', 'two, ""three"""', "", "  ", "b.png,four"]
    content = b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode()
    table = read(tmp_path, name, content)
    assert table.columns == ("image", "prompt")
    assert texts(table, "prompt") == ['one\r\ntwo, "three"', "four"]
    places = [table.where(row, "prompt") for row in range(2)]
    assert places == [f"{name}:2:prompt", f"{name}:6:prompt"]


def test_jsonl_bom_crlf_blank_lines_and_line_separators(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf\r\n{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n{"prompt": "c"}'
    table = read(tmp_path, "m.jsonl", content)
    assert texts(table, "prompt") == ["a\u2028b", "c"]
    assert table.where(1) == "m.jsonl:4"


def test_columns_are_those_of_all_rows(tmp_path: Path) -> None:
    table = read(tmp_path, "m.jsonl", '{"a": "1"}\n\n{"b": "2", "a": "3"}\n')
    assert list(table.rows) == [{"a": "1", "b": ""}, {"a": "3", "b": "2"}]
    assert table.chosen([1]).where(0, "b") == "m.jsonl:3:b"
    # A header may stand alone, and a single column hold commas in quotes.
    assert read(tmp_path, "m.csv", "image,prompt\n").columns == ("image", "prompt")
    assert texts(read(tmp_path, "m.csv", 'a\n"b, c"\n'), "a") == ["b, c"]


def test_a_cell_may_be_as_long_as_the_limit_and_the_csv_module_keeps_its_own(
    tmp_path: Path,
) -> None:
    before = csv.field_size_limit()
    assert texts(read(tmp_path, "m.csv", f"a\n{LONG[1:]}\n"), "a") == [LONG[1:]]
    assert csv.field_size_limit() == before


def test_columns_alone_are_those_of_the_table(tmp_path: Path) -> None:
    path = written(tmp_path, "metadata.csv", "a,b\n" + "x,y\n" * 40_000)
    source = find_source(tmp_path)
    found = Reading().read_columns(source, {})
    assert (found.columns, len(found.rows)) == (("a", "b"), 0)
    # What is wrong in a row is said when rows are read.
    path.write_text(path.read_text() + '"open\n')
    assert Reading().read_columns(source, {}).columns == ("a", "b")
    path.unlink()
    lines = '{"a": "x"}\n' * 40_000 + '{"b": "y"}\n'
    written(tmp_path, "metadata.jsonl", lines)
    assert Reading().read_columns(find_source(tmp_path), {}).columns == ("a", "b")
