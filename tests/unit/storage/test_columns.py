"""Tables of columns on disk are named by their bytes, and damage is noticed."""

from pathlib import Path

import pyarrow as pa
import pytest
from dstrain import StateError
from dstrain.storage import write_columns
from dstrain.storage.columns import open_columns

SCHEMA = pa.schema([("row", pa.int64()), ("prompt", pa.string())])
ROWS = {"row": [0, 1, 2], "prompt": ["a dog 0", "a dog 1", "a dog 2"]}


def written(folder: Path, count: int = 3) -> Path:
    """Write a table, row by row."""
    batches = [
        pa.record_batch({name: [ROWS[name][row]] for name in ROWS}, schema=SCHEMA)
        for row in range(count)
    ]
    return folder / f"{write_columns(folder, SCHEMA, batches)}.arrow"


def test_equal_tables_are_one_file_that_is_read_as_it_was_written(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    assert written(tmp_path) == path != written(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 2
    # What is mapped is none of Arrow's own memory.
    before = pa.total_allocated_bytes()
    table = open_columns(path)
    assert pa.total_allocated_bytes() == before
    assert table.to_pydict() == ROWS


@pytest.mark.parametrize("damage", ["first byte", "last byte", "gone", "a folder"])
def test_damage_is_noticed_and_says_what_to_do(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage.endswith("byte"):
        data[0 if damage == "first byte" else -1] ^= 1
        path.write_bytes(data)
    elif damage == "a folder":
        path.mkdir()
    with pytest.raises(StateError) as caught:
        open_columns(path, "fill it again")
    assert caught.value.where == str(path)
    assert caught.value.help_lines == ("fill it again",)
