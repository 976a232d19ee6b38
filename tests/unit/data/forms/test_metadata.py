"""Metadata is read strictly and kept as written."""

import csv
import json
import tracemalloc
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data import Table
from dstrain.data.forms import read_metadata
from dstrain.data.forms.metadata import read_columns

TOO_LONG = "x" * (2**20 + 1)


def read(folder: Path, name: str, content: str | bytes) -> Table:
    path = folder / name
    path.write_bytes(
        content
        if isinstance(content, bytes)
        else content.replace("LONG", TOO_LONG).encode()
    )
    table = read_metadata(path)
    table.refuse(table.faults)
    return table


def texts(table: Table, column: str) -> list[object]:
    return [row[column] for row in table.rows]


AS_WRITTEN = (
    "NA",
    "None",
    "nan",
    "null",
    "0001",
    "1e3",
    "1.0",
    "True",
    "",
    " padded ",
    "#x",
    "=1+1",
    "ünï 猫 🐈",
)


def test_csv_keeps_every_cell_as_the_text_that_was_written(tmp_path: Path) -> None:
    content = "image,prompt\n" + "".join(f'a.png,"{text}"\n' for text in AS_WRITTEN)
    assert texts(read(tmp_path, "m.csv", content), "prompt") == list(AS_WRITTEN)


@pytest.mark.parametrize("name", ["m.json", "m.jsonl"])
def test_json_keeps_every_text_as_written(tmp_path: Path, name: str) -> None:
    records = [{"prompt": text} for text in AS_WRITTEN]
    content = (
        json.dumps(records)
        if name == "m.json"
        else "\n".join(json.dumps(record) for record in records)
    )
    assert texts(read(tmp_path, name, content), "prompt") == list(AS_WRITTEN)


def test_json_numbers_and_booleans_become_the_text_that_was_written(
    tmp_path: Path,
) -> None:
    content = '{"a": 1.0}\n{"a": 12345678901234567890}\n{"a": 1e-5}\n{"a": true}\n{"a": false}\n{"a": null}\n{"b": 1}\n'
    table = read(tmp_path, "m.jsonl", content)
    assert texts(table, "a") == [
        "1.0",
        "12345678901234567890",
        "1e-5",
        "true",
        "false",
        "",
        "",
    ]
    assert table.columns == ("a", "b")


def test_json_lists_of_texts_stay_lists(tmp_path: Path) -> None:
    assert texts(
        read(tmp_path, "m.json", '[{"images": ["a.png", "b.png"]}]'), "images"
    ) == [["a.png", "b.png"]]


@pytest.mark.parametrize("name", ["m.csv", "m.CSV"])
def test_csv_bom_crlf_quoted_newlines_quotes_and_commas(
    tmp_path: Path, name: str
) -> None:
    content = b'\xef\xbb\xbfimage,prompt\r\na.png,"one\r\ntwo, ""three"""\r\n\r\n  \r\nb.png,four\r\n'
    table = read(tmp_path, name, content)
    assert table.columns == ("image", "prompt")
    assert texts(table, "prompt") == ['one\r\ntwo, "three"', "four"]
    assert [table.where(i, "prompt") for i in range(2)] == [
        f"{name}:2:prompt",
        f"{name}:6:prompt",
    ]


def test_jsonl_bom_crlf_blank_lines_and_line_separators_inside_texts(
    tmp_path: Path,
) -> None:
    content = b'\xef\xbb\xbf\r\n{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n{"prompt": "c"}'
    table = read(tmp_path, "m.jsonl", content)
    assert texts(table, "prompt") == ["a\u2028b", "c"]
    assert table.where(1) == "m.jsonl:4"


def test_a_csv_of_one_column_may_hold_commas_only_in_quotes(tmp_path: Path) -> None:
    assert texts(read(tmp_path, "m.csv", 'prompt\n"a, b"\n'), "prompt") == ["a, b"]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("m.csv", "", "is empty"),
        (
            "m.csv",
            "image,prompt\na.png\nb.png,x\nc.png,x,y\n",
            "m.csv:2: has 1 value,.*\n.*m.csv:4: has 3 values",
        ),
        ("m.csv", "image,image\na,b\n", "has the same name as an earlier one, 'image'"),
        (
            "m.csv",
            ",image\n0,b\n",
            "column 1 has no name; name it or remove it .pandas: index=False.",
        ),
        ("m.csv", "image, prompt\na,b\n", "has spaces around its name, ' prompt'"),
        ("m.csv", 'image,prompt\na.png,"open\nb.png,x\n', "m.csv:2: is not valid CSV"),
        ("m.csv", 'image,prompt\na.png,"x"y\n', "m.csv:2: is not valid CSV"),
        (
            "m.csv",
            b"image,prompt\na.png,caf\xe9\n",
            "m.csv:2: is not UTF-8 text .byte 0xe9",
        ),
        (
            "m.csv",
            "i\0mage\n".encode("utf-16"),
            "m.csv:1: is not UTF-8 text .byte 0xff",
        ),
        ("m.json", '{"prompt": "a"}', "is not a list of objects"),
        ("m.json", '[{"prompt": "a"},]', "is not valid JSON"),
        (
            "m.json",
            '[{"prompt": "a"}, ["b"], "c"]',
            "m.json:2: is not an object.*\n  m.json:3: is not an object",
        ),
        (
            "m.json",
            '[{"a": {"b": 1}}, {"a": [["x"]]}]',
            "m.json:1:a: must be text.*\n.*m.json:2:a: must be text",
        ),
        ("m.json", '[{"a": ["x", null]}]', "m.json:1:a"),
        ("m.json", '[{"a": NaN}]', "m.json:1:a: nan is not valid JSON"),
        ("m.json", "[" * 100_000, "nested too deeply"),
        (
            "m.jsonl",
            '{"a": "x"}\n{"a": \n{"a": "x"\n',
            "m.jsonl:2: is not valid JSON.*\n.*m.jsonl:3: is not valid JSON",
        ),
        ("m.jsonl", '{"a": "x", "a": "y"}', "m.jsonl:1:a: appears twice in the row"),
        ("m.txt", "a", "must be a .csv, .json or .jsonl file"),
        ("m.csv", "image;prompt\na;b\n", "m.csv:1: has ';' between its values"),
        (
            "m.csv",
            "\n\nimage\tprompt\na\tb, c\n",
            "m.csv:3: has '\\\\t' between its values",
        ),
        ("m.csv", "image|prompt\na|b\n", "m.csv:1: has '.' between its values"),
        ("m.csv", "a,b\n".encode("utf-16-be"), "column 1 contains a NUL character"),
        ("m.csv", ("猫犬" * 40).encode("utf-16"), "is not UTF-8 text .byte 0xff"),
        ("m.json", '[{"a": "b"}]'.encode("utf-32"), "is not UTF-8 text .byte 0xff"),
        (
            "m.csv",
            "a,b\nx,y\0\n\0,z\n",
            "m.csv:2:b: contains a NUL character.*\n.*m.csv:3:a: contains a NUL",
        ),
        (
            "m.json",
            '[{"a": "\\ud800"}, {"a": ["\\u0000"]}]',
            "m.json:1:a: contains half of a.*\n.*m.json:2:a: contains a NUL",
        ),
        ("m.json", '[{"\\ud800": "a"}]', "column 1 contains half of a surrogate pair"),
        (
            "m.csv",
            "a,b\nx,LONG\nLONG,\n",
            "m.csv:2:b: has 1,048,577.*\n.*m.csv:3:a: has",
        ),
        ("m.jsonl", '{"a": "LONG"}', "m.jsonl:1:a: has 1,048,577 characters"),
        (
            "m.json",
            '{"a": 1}\n{"a": 2}\n',
            r"m.json: is not valid JSON.*\n.*for one object per line, use \.jsonl",
        ),
        ("m.json", '{"a": ["b"]}', "is not a list of objects"),
        (
            "m.jsonl",
            '[{"a": "b"},\n{"a": "c"}]',
            "m.jsonl:1: is not valid JSON",
        ),
        (
            "m.jsonl",
            '["a"]\n{"a": "b"}\n',
            "m.jsonl:1: is not an object; a .json file contains a list",
        ),
        ("m.csv", 'a,b\n"x,y\n', "m.csv:2: is not valid CSV.*\n.*close the quotes"),
        (
            "m.csv",
            "a,b\nx\0,y,z\n",
            "m.csv: 2 bad rows\n.*m.csv:2:a: contains a NUL.*\n.*m.csv:2: has 3 values.*quotes",
        ),
    ],
)
def test_what_is_not_one_clean_table_is_refused_and_named(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        read(tmp_path, name, content)


def test_a_cell_may_be_as_long_as_the_limit_and_the_csv_module_keeps_its_own(
    tmp_path: Path,
) -> None:
    before = csv.field_size_limit()
    assert texts(read(tmp_path, "m.csv", f"a\n{'x' * 2**20}\n"), "a") == ["x" * 2**20]
    assert csv.field_size_limit() == before


def test_bad_rows_keep_their_place_in_the_table(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": "x"}\n{"a":\n\n["y"]\n{"a": {}, "b": "z"}\n')
    table = read_metadata(path)
    assert [dict(row) for row in table.rows] == [
        {"a": "x", "b": ""}, {"a": "", "b": ""}, {"a": "", "b": ""}, {"a": "", "b": "z"},
    ]  # fmt: skip
    assert [(fault.row, fault.column) for fault in table.faults] == [
        (1, ""),
        (2, ""),
        (3, "a"),
    ]
    assert [table.where(row) for row in range(4)] == [
        "m.jsonl:1",
        "m.jsonl:2",
        "m.jsonl:4",
        "m.jsonl:5",
    ]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such metadata file"):
        read_metadata(tmp_path / "m.csv")


def test_a_header_alone_is_a_table_without_rows(tmp_path: Path) -> None:
    assert read(tmp_path, "m.csv", "image,prompt\n").columns == ("image", "prompt")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_rows_are_not_kept_in_ram(tmp_path: Path, suffix: str) -> None:
    prompt = "a dog in the park " + "x" * 500
    header, row = "image,prompt\n", f"a.png,{prompt}\n"
    if suffix == ".jsonl":
        header, row = "", json.dumps({"image": "a.png", "prompt": prompt}) + "\n"
    kept = {}
    for count in (2_000, 6_000):
        path = tmp_path / f"{count}{suffix}"
        path.write_text(header + row * count)
        tracemalloc.start()
        table = read_metadata(path)
        assert sum(len(row["prompt"]) for row in table.rows) == count * len(prompt)
        kept[count] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    # What waits to be written is not more for more rows.
    assert kept[6_000] - kept[2_000] < 100 * 4_000


def test_columns_are_those_of_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": "1"}\n\n{"b": "2", "a": "3"}\n')
    table = read_metadata(path)
    assert [dict(row) for row in table.rows] == [
        {"a": "1", "b": ""},
        {"a": "3", "b": "2"},
    ]
    assert table.lines.tolist() == [1, 3]
    assert table.chosen([1]).where(0, "b") == "m.jsonl:3:b"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_columns_alone_are_those_of_the_table(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"metadata.{suffix}"
    count = 40_000
    if suffix == "csv":
        path.write_text("a,b\n" + "x,y\n" * count)
    else:
        path.write_text('{"a": "x"}\n' * count + '{"b": "y"}\n')
    found = read_columns(path)
    assert found.columns == read_metadata(path).columns == ("a", "b")
    assert len(found.rows) == (0 if suffix == "csv" else count + 1)
    # What is wrong in a row is said when rows are read.
    if suffix == "csv":
        path.write_text(path.read_text() + '"open\n')
        assert read_columns(path).columns == ("a", "b")
