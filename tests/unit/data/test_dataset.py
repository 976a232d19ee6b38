"""A dataset says which samples are alike, and which row an error is about."""

import tracemalloc
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data import Cell, Dataset, Table
from dstrain.data.dataset import CheckedSample
from dstrain.plugin import Column

from tests.support.datasets import open_rows

COLUMNS = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image"),
    "mode": Column("mode", same_in_batch=True),
    "words": Column("words", "texts"),
}


def dataset(*samples: dict[str, Cell], pads_texts: bool = False) -> Dataset:
    """A dataset with a row for each sample, the first in line 2."""
    rows = [{"prompt": "", "image": "", "mode": "", "note": ""} for _ in samples]
    lines = range(2, 2 + len(rows))
    table = Table(Path("metadata.csv"), tuple(rows[0]), rows, lines)
    numbered = (
        CheckedSample((row, 0), [(1, cells)]) for row, cells in enumerate(samples)
    )
    return Dataset.of(table, numbered, COLUMNS, pads_texts)


def text(words: str) -> Cell:
    return Cell("text", words)


def image(height: int, width: int) -> Cell:
    sizes = ((height, width),)
    return Cell("image", files=("a.png",), parameters=(("sizes", sizes),))


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        (("a", "a" * 64, "a" * 65, "a" * 96, "a" * 97), [0, 0, 1, 1, 2]),
        # By bytes: a letter of Chinese is as many tokens as a word of three letters.
        (("a" * 64, "图" * 21, "图" * 22), [0, 0, 1]),
        (("a" * 100_000, "a" * 10_000_000), [0, 1]),
    ],
)
def test_samples_are_alike_by_a_coarse_length_where_batches_are_padded(
    prompts: tuple[str, ...], groups: list[int]
) -> None:
    samples = [{"prompt": text(prompt)} for prompt in prompts]
    assert dataset(*samples, pads_texts=True).groups.tolist() == groups
    assert dataset(*samples).groups.tolist() == [0] * len(prompts)


def test_all_texts_of_a_row_that_are_from_columns_count_together() -> None:
    words = Cell("texts", ["a" * 30, "b" * 30])
    data = dataset(
        {"prompt": text("a" * 60), "words": Cell("texts", [])},
        {"prompt": text("a" * 4), "words": words},
        {"prompt": text("a" * 5), "words": words},
        {"prompt": text("a" * 5), "words": words, "constant": text("a" * 99)},
        pads_texts=True,
    )
    # The last has another input, and not another length.
    assert data.groups.tolist() == [0, 0, 1, 2]
    assert data.signature(3) - data.signature(2) == {("constant", ())}


def test_an_error_of_an_input_names_its_cell() -> None:
    data = dataset({"input_image": image(64, 96)})
    error = UsageError("/data/a.png", "cannot be read", "fix it")
    found = data.damage(0, "input_image", error)
    assert found.where == "metadata.csv:2:image"
    assert found.what.startswith("'a.png' ")
    assert found.help_lines == ("fix it",)
    assert data.damage(1, "input_image", error) is error  # of a preview


@pytest.mark.parametrize(("row", "where"), [(0, "metadata.csv:2"), (1, "unit f")])
def test_an_error_of_a_block_gets_the_row_it_is_about(row: int, where: str) -> None:
    """But for that of a preview, which no row of the table gives."""
    data = dataset({"prompt": text("a dog")})
    with pytest.raises(UsageError) as caught, data.errors_at(row):
        raise UsageError("unit f", "cannot", "do this")
    assert caught.value.where == where
    assert ("unit f" in caught.value.what) is (row == 0)
    assert caught.value.help_lines == ("do this",)


def test_cells_of_any_kind_are_read_as_they_were_checked() -> None:
    frames = ("frames", (0, 2, 300))
    mark = [1, 2, 3, 4]
    clip = (frames, ("fps", 16.0))
    cells = {
        "prompt": text("a dog \U0001f415 and \u2028"),
        "words": Cell("texts", ["a", "b"]),
        "strength": Cell("number", 1.0),
        "seed": Cell("integer", 10**17),
        "control": Cell("video", None, ("\udcff.mp4",), clip, (mark,)),
        "frames": Cell("video", None, ("a", "b"), (frames,), (mark, mark), "folder"),
    }
    # More sizes than are kept in memory.
    sizes = [{"input_image": image(8, number)} for number in range(4100)]
    samples = [cells, {}, *sizes, cells]
    data = dataset(*samples)
    assert list(data.rows) == samples
    assert (data.rows[-2], data.rows[0]) == (sizes[-1], cells)
    assert list(data.rows[1:3]) == [{}, sizes[0]]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_dataset_keeps_few_bytes_of_a_row_in_ram(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"rows.{form}"
    text = "x" * 1000
    header, row = ("prompt\n", f"{text}\n")
    if form == "jsonl":
        header, row = ("", f'{{"prompt": "{text}"}}\n')
    kept = {}
    for count in (1_200, 3_600):
        path.write_text(header + row * count)
        tracemalloc.start()
        data = open_rows(tmp_path, None, COLUMNS, metadata_path=path)
        assert sum(len(cells["prompt"].literal) for cells in data.rows) == 1000 * count
        kept[count] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    # What waits to be written is not more for more rows.
    assert kept[3_600] - kept[1_200] < 200 * 2_400
