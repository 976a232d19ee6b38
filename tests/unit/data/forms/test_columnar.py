"""Parquet and arrow files are read batch by batch, and only what is used of them."""

import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dstrain import UsageError
from dstrain.data import Table
from dstrain.data.forms import columnar
from dstrain.data.forms.columnar import (
    columnar_columns,
    columnar_texts,
    read_columnar,
)

WANTED = {"image": True, "text": False}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))


def table(count: int, **more: Any) -> Any:
    images = [{"bytes": b"%d" % n, "path": f"{n}.png"} for n in range(count)]
    texts = [f"caption {n}" for n in range(count)]
    return pa.table({"image": images, "text": texts, **more})


def parquet(folder: Path, name: str, content: Any) -> Path:
    pq.write_table(content, folder / name, row_group_size=5)
    return folder / name


def read(path: Path, *files: Path) -> Table:
    return read_columnar(path, files, "parquet", WANTED)


def test_rows_of_all_files_are_one_table_with_their_places(tmp_path: Path) -> None:
    a = parquet(tmp_path, "a.parquet", table(12))
    b = parquet(tmp_path, "b.parquet", table(3))
    found = read(tmp_path, a, b)
    assert [row["text"] for row in found.rows][11:] == [
        *("caption 11", "caption 0", "caption 1", "caption 2")
    ]
    images = [Path(str(row["image"])).read_bytes() for row in found.rows]
    assert images == [b"%d" % n for n in (*range(12), *range(3))]
    assert found.where(11) == "a.parquet:12"
    assert found.where(13, "text") == "b.parquet:2:text"
    assert found.chosen([13]).where(0) == "b.parquet:2"
    assert list(columnar_texts([b]))[-3:] == ["caption 0", "caption 1", "caption 2"]


def test_texts_are_found_in_every_type_and_no_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = {"bytes": b"the bytes", "path": "the path"}
    content = {
        "image": [image],
        "images": [[image | {"path": "in a list"}]],
        "nested": [{"deep": [{"text": "deep", "raw": b"the bytes"}]}],
        "map": pa.array([[("key", "value")]], pa.map_(pa.string(), pa.string())),
        "a.b": ["with a dot"],
        "large": pa.array(["large"], pa.large_string()),
        "view": pa.array(["view"], pa.string_view()),
        "choice": pa.array(["choice"]).dictionary_encode(),
        "number": [3],
        "raw": [b"the bytes"],
    }
    path = parquet(tmp_path, "a.parquet", pa.table(content))
    raw = parquet(tmp_path, "raw.parquet", pa.table({"raw": [b"the bytes"]}))
    batches = columnar._batches

    def checking(file: Path, columns: Any) -> Any:
        for batch in batches(file, columns):
            assert "the bytes" not in str(batch.to_pylist())
            yield batch

    monkeypatch.setattr(columnar, "_batches", checking)
    assert sorted(columnar_texts([path, raw])) == sorted(
        [
            *("the path", "in a list", "deep", "key", "value"),
            *("with a dot", "large", "view", "choice"),
        ]
    )


def test_embedded_files_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path, "a.parquet", table(7))
    rows = list(read(path, path).rows)
    asked = []
    batches = columnar._batches

    def noting(file: Path, columns: Any, at_once: int) -> Any:
        asked.append(columns)
        return batches(file, columns, at_once)

    monkeypatch.setattr(columnar, "_batches", noting)
    assert list(read(path, path).rows) == rows
    assert asked == [["text"]]


def test_columns_that_are_not_used_may_be_anything(tmp_path: Path) -> None:
    strange = pa.array([{"x": 1}] * 2)
    path = parquet(tmp_path, "a.parquet", table(2, strange=strange))
    found = read(path, path)
    assert found.columns == ("image", "text", "strange")
    assert list(found.rows[0]) == ["image", "text"]
    assert columnar_columns(path, [path], "parquet").columns == found.columns
    with pytest.raises(UsageError, match=r"a\.parquet:strange: is a column of struct"):
        read_columnar(path, [path], "parquet", {"strange": False})


def test_faults_are_named_by_row_and_column(tmp_path: Path) -> None:
    content = pa.table({"text": ["a", "b\0", "x" * (2**20 + 1)]})
    path = parquet(tmp_path, "a.parquet", content)
    found = read_columnar(path, [path], "parquet", {"text": False})
    with pytest.raises(UsageError) as caught:
        found.refuse(found.faults)
    first, second = caught.value.help_lines
    assert first.startswith("a.parquet:2:text: contains a NUL")
    assert second.startswith("a.parquet:3:text: has 1,048,577 characters")


@pytest.mark.parametrize("as_record", [False, True])
def test_base64_text_is_no_file_name_however_long_it_is(
    tmp_path: Path, as_record: bool
) -> None:
    texts = ["/9j/4AAQ" * count for count in (75_000, 200_000)]
    cells = [{"bytes": None, "path": one} for one in texts] if as_record else texts
    content = pa.table({"image": cells, "text": ["a", "b"]})
    path = parquet(tmp_path, "a.parquet", content)
    found = read(path, path)
    with pytest.raises(UsageError) as caught:
        found.refuse(found.faults)
    first, second, advice = caught.value.help_lines
    assert first == "a.parquet:1:image: is not a file name (600,000 characters)"
    assert second == "a.parquet:2:image: is not a file name (1,600,000 characters)"
    assert "embed images as bytes" in advice


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"image,text\n"]
)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"a\.{ending}: cannot be read as {ending}"):
        read(path, path)


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, table(9).schema) as writer:
        writer.write_table(table(900))
    path.write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(UsageError, match="cannot be read as arrow"):
        read(path, path)


def test_files_of_other_columns_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    a = parquet(tmp_path, "a.parquet", table(2))
    b = parquet(tmp_path, "b.parquet", pa.table({"text": ["x"]}))
    with pytest.raises(
        UsageError, match=r"b\.parquet: has other columns than a.*image"
    ):
        read(tmp_path, a, b)
    with pytest.raises(UsageError, match="is not a regular file"):
        read(tmp_path, tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        read(tmp_path, tmp_path / "none.parquet")


def test_many_rows_take_little_memory(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        path = parquet(
            tmp_path, f"{count}.parquet", pa.table({"text": ["x" * 200] * count})
        )
        tracemalloc.start()
        found = read_columnar(path, [path], "parquet", {"text": False})
        assert len(found.rows) == count
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(10)
    assert peak(30_000) < peak(6_000) + 24_000 * 100
