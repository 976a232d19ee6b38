"""Parquet and arrow files are read batch by batch, and only what is used of them; files
that are embedded in them are written once, each under the digest of its bytes.
"""

import hashlib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dstrain import SystemFault, UsageError
from dstrain.data import Table
from dstrain.data.tables import (
    Reading,
    Source,
    embedded_folder,
    find_source as find_any,
    texts_of,
)
from dstrain.graph import Input
from dstrain.plugin import Column
from dstrain_datasets.forms.columnar import Arrow, Parquet

PROMPT: Mapping[str, Input] = {"prompt": Column("text")}
INPUTS: Mapping[str, Input] = {**PROMPT, "input_image": Column("image", "image")}
FORMS = (Parquet(), Arrow())
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("DSTRAIN_CACHE", f"{tmp_path.name}/cache")


def find_source(base: Path, metadata: Path | None = None) -> Source:
    return find_any(base, metadata, forms=FORMS)


def table(count: int, **more: Any) -> Any:
    images = [{"bytes": b"%d" % n, "path": f"{n}.png"} for n in range(count)]
    texts = [f"caption {n}" for n in range(count)]
    return pa.table({"image": images, "text": texts, **more})


def parquet(folder: Path, name: str, content: Any) -> Path:
    pq.write_table(content, folder / name, row_group_size=5)
    return folder / name


def read(path: Path, inputs: Mapping[str, Input] = INPUTS, **wanted: Any) -> Table:
    """Read a file, or the files of a folder."""
    base = path if path.is_dir() else path.parent
    source = find_source(base, None if path.is_dir() else path)
    return Reading().read(source, inputs, **wanted)


def read_one(folder: Path, kind: Any, value: Any, column: Column) -> Any:
    """The cell of a value of a type, read for a column, before a row without one."""
    content = pa.table({column.name: pa.array([value, None], kind)})
    found = read(parquet(folder, "a.parquet", content), {"input": column})
    found.refuse(found.faults)
    return found.rows[0][column.name]


def test_rows_of_all_files_are_one_table_with_their_places(tmp_path: Path) -> None:
    parquet(tmp_path, "a.parquet", table(12))
    parquet(tmp_path, "b.parquet", table(3))
    found = read(tmp_path)
    numbers = [*range(12), *range(3)]
    assert [row["text"] for row in found.rows] == [f"caption {n}" for n in numbers]
    images = [Path(str(row["image"])).read_bytes() for row in found.rows]
    assert images == [b"%d" % n for n in numbers]
    assert found.where(11) == "a.parquet:12"
    assert found.where(13, "text") == "b.parquet:2:text"
    assert found.chosen([13]).where(0) == "b.parquet:2"


@pytest.mark.parametrize(
    ("kind", "value", "cell"),
    [
        (pa.string(), "a dog", "a dog"),
        (pa.large_string(), "", ""),
        (pa.string_view(), "a", "a"),
        (pa.string(), None, ""),
        (pa.int64(), 7, "7"),
        (pa.float64(), 0.5, "0.5"),
        (pa.bool_(), True, "true"),
        (pa.decimal128(5, 2), Decimal("1.50"), "1.50"),
        (pa.null(), None, ""),
        (pa.list_(pa.string()), ["a", "b"], ["a", "b"]),
        (pa.large_list(pa.int64()), [1], ["1"]),
        (pa.list_(pa.string()), [], ""),
        (pa.list_(pa.string(), 2), ["a", "b"], ["a", "b"]),
        (pa.dictionary(pa.int8(), pa.string()), "a", "a"),
    ],
)
def test_values_are_cells_as_they_would_be_written_in_a_table(
    tmp_path: Path, kind: Any, value: Any, cell: Any
) -> None:
    assert read_one(tmp_path, kind, value, Column("x", "texts")) == cell


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.string(), "a\0b"),
        (pa.string(), "x" * (2**20 + 1)),
        (pa.float64(), float("nan")),
        (pa.list_(pa.string()), ["a", None]),
    ],
)
def test_what_no_table_could_say_is_a_fault_of_its_row(
    tmp_path: Path, kind: Any, value: Any
) -> None:
    with pytest.raises(UsageError) as caught:
        read_one(tmp_path, kind, value, Column("x", "texts"))
    # Without advice on images.
    (line,) = caught.value.help_lines
    assert line.startswith("a.parquet:1:x: ")


@pytest.mark.parametrize(
    "kind", [PICTURE, pa.binary(), pa.map_(pa.string(), pa.int8())]
)
def test_a_type_that_is_no_text_is_refused_where_it_is_used(
    tmp_path: Path, kind: Any
) -> None:
    strange = pa.array([None, None], kind)
    path = parquet(tmp_path, "a.parquet", table(2, strange=strange))
    found = read(path)
    assert found.columns == ("image", "text", "strange")
    assert sorted(found.rows[0]) == ["image", "text"]
    source = find_source(tmp_path)
    assert Reading().read_columns(source, INPUTS).columns == found.columns
    with pytest.raises(UsageError) as caught:
        read(path, {"x": Column("strange")})
    assert caught.value.where == f"{path}:strange"


def test_texts_are_found_in_every_type(tmp_path: Path) -> None:
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
    wanted = [
        *("the path", "in a list", "deep", "key", "value"),
        *("with a dot", "large", "view", "choice"),
    ]
    path = parquet(tmp_path, "a.parquet", pa.table(content))
    assert sorted(texts_of(find_source(tmp_path, path))) == sorted(wanted)
    path = parquet(tmp_path, "raw.parquet", pa.table({"raw": [b"the bytes"]}))
    assert not list(texts_of(find_source(tmp_path, path)))


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"image,text\n"]
)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.where == str(path)


def test_many_rows_are_read_as_they_are_and_a_file_that_was_cut_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.arrow"
    texts = [f"caption {number}" for number in range(3000)]
    content = pa.table({"text": texts})
    with pa.ipc.new_stream(path, content.schema) as writer:
        writer.write_table(content)
    found = read(path, PROMPT)
    assert [row["text"] for row in found.rows] == texts
    assert found.where(2999) == "a.arrow:3000"
    path.write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(UsageError) as caught:
        read(path, PROMPT)
    assert caught.value.where == str(path)


def test_files_of_other_columns_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path, "a.parquet", table(2))
    b = parquet(tmp_path, "b.parquet", pa.table({"text": ["x"]}))
    with pytest.raises(UsageError, match="image") as caught:
        read(tmp_path)
    assert caught.value.where == str(b)
    b.unlink()
    parquet(tmp_path, "b.parquet", table(2, more=["x", "y"]))
    with pytest.raises(UsageError, match="more"):
        read(tmp_path)
    twice = pa.table([["x"], ["y"]], names=["text", "text"])
    with pytest.raises(UsageError, match="'text'"):
        read(parquet(tmp_path, "twice.parquet", twice))
    (tmp_path / "folder.parquet").mkdir()
    for name in ("folder.parquet", "none.parquet"):
        with pytest.raises(UsageError) as caught:
            Reading().read(find_source(tmp_path, tmp_path / name), INPUTS)
        assert caught.value.where == str(tmp_path / name)


# Embedded files.


def keep(folder: Path, data: bytes | None, name: str | None = "a.png") -> str:
    """The cell of a file that is embedded in a row."""
    picture = {"bytes": data, "path": name}
    cell = read_one(folder, PICTURE, picture, Column("x", "image"))
    assert isinstance(cell, str)
    return cell


def test_equal_bytes_are_one_file_of_their_digest(tmp_path: Path) -> None:
    path = Path(keep(tmp_path, b"bytes", "x/a.PNG"))
    assert path.read_bytes() == b"bytes"
    assert path.name == hashlib.sha256(b"bytes").hexdigest() + ".png"
    assert path.is_relative_to(embedded_folder())
    time = path.stat().st_mtime_ns
    assert keep(tmp_path, b"bytes", "b.png") == str(path)
    assert path.stat().st_mtime_ns == time
    # What is not whole is written again.
    path.write_bytes(b"byt")
    keep(tmp_path, b"bytes", "b.png")
    assert path.read_bytes() == b"bytes"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"bytes")
    keep(tmp_path, b"bytes", "c.png")
    assert not path.is_symlink()


def test_files_are_bytes_or_names(tmp_path: Path) -> None:
    kept = keep(tmp_path, b"pixels")
    assert keep(tmp_path, None, "a.png") == "a.png"
    assert keep(tmp_path, None, None) == ""
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        bare = read_one(tmp_path, kind, b"pixels", Column("x", "image"))
        assert bare == kept.removesuffix(".png")
    # A file without bytes is one, and a bad row.
    assert Path(keep(tmp_path, b"")).is_file()
    pictures = [{"bytes": b"pixels", "path": "a.png"}]
    named = pa.struct([("path", pa.string())])
    found = read_one(tmp_path, named, {"path": "a.png"}, Column("x", "image"))
    assert found == "a.png"
    several = read_one(tmp_path, pa.list_(PICTURE), pictures, Column("x", "images"))
    assert several == [kept]
    assert read_one(tmp_path, pa.string(), "a.png", Column("x", "image")) == "a.png"


@pytest.mark.parametrize("name", ["", "../../x", "a.p/../g", "a.verylong", "a. png"])
def test_a_name_gives_nothing_but_a_short_ending(tmp_path: Path, name: str) -> None:
    path = Path(keep(tmp_path, b"bytes", name))
    assert path.parent.parent == embedded_folder()
    assert path.suffix == ""


def test_without_a_place_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "a.parquet"))
    with pytest.raises(SystemFault):
        keep(tmp_path, b"bytes")

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.delenv("DSTRAIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UsageError) as caught:
        embedded_folder()
    assert caught.value.where == "DSTRAIN_CACHE"
