"""Tables of columns on disk."""

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest
from dstrain import StateError, SystemFault
from dstrain.storage import write_columns
from dstrain.storage.columns import SUFFIX, open_columns

from tests.support.unreadable import make_unreadable

SCHEMA = pa.schema([("row", pa.int64()), ("prompt", pa.string())])


def _batches(count: int) -> list[pa.RecordBatch]:
    return [
        pa.record_batch({"row": [number], "prompt": [f"a dog {number}"]}, schema=SCHEMA)
        for number in range(count)
    ]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    name = write_columns(tmp_path, SCHEMA, _batches(3))
    table = open_columns(tmp_path / f"{name}{SUFFIX}")
    assert table.to_pydict() == {
        "row": [0, 1, 2],
        "prompt": ["a dog 0", "a dog 1", "a dog 2"],
    }


def test_equal_tables_are_one_file(tmp_path: Path) -> None:
    names = {write_columns(tmp_path, SCHEMA, _batches(3)) for _ in range(2)}
    names.add(write_columns(tmp_path, SCHEMA, _batches(2)))
    assert {path.stem for path in tmp_path.iterdir()} == names
    assert len(names) == 2


def test_a_reader_takes_no_ram(tmp_path: Path) -> None:
    """What is mapped is none of Arrow's own memory."""
    name = write_columns(tmp_path, SCHEMA, _batches(100))
    before = pa.total_allocated_bytes()
    table = open_columns(tmp_path / f"{name}{SUFFIX}")
    assert len(table) == 100
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("place", [0, 40, -1])
def test_damage_is_noticed(tmp_path: Path, place: int) -> None:
    path = tmp_path / f"{write_columns(tmp_path, SCHEMA, _batches(3))}{SUFFIX}"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="is damaged"):
        open_columns(path, "fill it again")


def test_a_missing_file_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(StateError) as caught:
        open_columns(tmp_path / "absent.arrow", "fill it again")
    assert caught.value.help_lines == ("fill it again",)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def batches() -> list[pa.RecordBatch]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_columns(tmp_path, SCHEMA, (one for _ in "a" for one in batches()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_fault_of_the_machine_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    name = write_columns(tmp_path, SCHEMA, [])
    path = tmp_path / f"{name}{SUFFIX}"
    make_unreadable(monkeypatch, path, number)
    with pytest.raises(SystemFault, match=f"cannot be read: {os.strerror(number)}"):
        open_columns(path, "fill it again")


def test_a_file_that_cannot_be_mapped_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_columns(tmp_path, SCHEMA, [])

    def fails(path: bytes) -> None:
        raise OSError(errno.EMFILE, "Failed to open local file")

    monkeypatch.setattr(pa, "memory_map", fails)
    with pytest.raises(SystemFault, match="Too many open files"):
        open_columns(tmp_path / f"{name}{SUFFIX}")


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").mkdir()
    with pytest.raises(StateError, match="Is a directory"):
        open_columns(tmp_path / "a.arrow")
