"""Several datasets are one: their rows, places and digests follow each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrain import UsageError
from dstrain.data import Dataset, Fault
from dstrain.data.tables import find_source, join_datasets, join_sources
from dstrain.plugin import Column
from PIL import Image

from tests.support.datasets import open_rows


def dataset(
    folder: Path,
    name: str,
    sides: Sequence[int],
    column: str = "image",
    bad: str = "",
    **more: Any,
) -> Dataset:
    """A dataset of square images of these sides, and of a bad row if it is named."""
    (folder / name).mkdir(exist_ok=True)
    names = [f"{name}{number}.png" for number in range(len(sides))]
    for file, side in zip(names, sides, strict=True):
        Image.new("RGB", (side, side)).save(folder / name / file)
    table = "\n".join([column, *names, *[bad] * bool(bad)])
    inputs = {"image": Column(column, "image", multiple=8)}
    return open_rows(folder / name, table, inputs, on_bad_sample="skip", **more)


def test_a_fault_names_column_and_row_of_its_own_dataset(tmp_path: Path) -> None:
    parts = [dataset(tmp_path, "a", [8, 8]), dataset(tmp_path, "b", [8], "photo")]
    joined = join_datasets(parts, "xy")
    error = UsageError("x.png", "is bad")
    names = [joined.fault(row, "image", error).column for row in range(3)]
    assert names == ["image", "image", "photo"]
    kept = joined.without([Fault(0, "image", "is bad")])
    assert kept.damage(2, "image", error).where == "metadata.csv:2:photo"


def test_the_digest_is_of_all_in_their_order(tmp_path: Path) -> None:
    tables = [dataset(tmp_path, name, [8]) for name in "ab"]
    sources = [find_source(tmp_path / name) for name in "ab"]
    both, turned = join_sources(sources), join_sources(sources[::-1])
    assert both.parts == tuple(sources)
    assert both.in_words == "2 datasets"
    assert len({both.digest(), turned.digest(), sources[0].digest()}) == 3
    joined = join_datasets(tables, [one.digest() for one in sources])
    assert joined.table.digest == both.digest()
    # A single one is the same in both, too.
    joined = join_datasets(tables[:1], [sources[0].digest()])
    assert joined.table.digest == join_sources(sources[:1]).digest()
