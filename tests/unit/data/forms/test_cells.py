"""Values of parquet become cells as they would be written in a table."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dstrain import UsageError
from dstrain.data.forms.cells import converter, is_embedded
from dstrain.data.forms.embedded import EmbeddedFiles

PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize(
    ("kind", "value", "cell"),
    [
        (pa.string(), "a dog", "a dog"),
        (pa.large_string(), "", ""),
        (pa.string(), None, ""),
        (pa.int64(), 7, "7"),
        (pa.float64(), 0.5, "0.5"),
        (pa.bool_(), True, "true"),
        (pa.decimal128(5, 2), Decimal("1.50"), "1.50"),
        (pa.list_(pa.string()), ["a", "b"], ["a", "b"]),
        (pa.list_(pa.string()), [], ""),
        (pa.dictionary(pa.int8(), pa.string()), "a", "a"),
    ],
)
def test_values_are_text_and_lists_of_text(kind: Any, value: Any, cell: Any) -> None:
    assert converter("x", kind, False, None)(value) == cell


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.string(), "a\0b"),
        (pa.string(), "x" * (2**20 + 1)),
        (pa.float64(), float("nan")),
    ],
)
def test_what_no_table_could_say_is_a_fault(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        converter("x", kind, False, None)(value)


@pytest.mark.parametrize(
    "kind", [PICTURE, pa.binary(), pa.map_(pa.string(), pa.int8())]
)
def test_a_type_that_is_no_text_is_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match="x: is a column of"):
        converter("x", kind, False, None)


def test_files_are_bytes_or_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path))
    store = EmbeddedFiles()
    convert = converter("x", PICTURE, True, store)
    written = convert({"bytes": b"pixels", "path": "a.png"})
    assert isinstance(written, str)
    assert Path(written).read_bytes() == b"pixels"
    assert convert({"bytes": None, "path": "a.png"}) == "a.png"
    assert convert({"bytes": None, "path": None}) == convert(None) == ""
    assert converter("x", pa.binary(), True, store)(b"pixels") == written[:-4]
    several = converter("x", pa.list_(PICTURE), True, store)
    assert several([{"bytes": b"pixels", "path": "a.png"}]) == [written]
    assert is_embedded(pa.list_(PICTURE))
    assert not is_embedded(pa.string())


def test_a_null_in_a_list_is_refused() -> None:
    convert = converter("x", pa.list_(pa.string()), False, None)
    with pytest.raises(ValueError, match="has a null in its list"):
        convert(["a", None])
