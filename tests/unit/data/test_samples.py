"""The cells of samples are kept on disk, and read as they were checked."""

from collections.abc import Mapping

import pytest
from dstrain.data import Cell
from dstrain.data.samples import MOST_FORMS, SampleCells


def _kept(*samples: Mapping[str, Cell]) -> SampleCells:
    rows = SampleCells()
    for cells in samples:
        rows.append(cells)
    return rows


def test_cells_of_any_kind_are_read_as_they_were_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = ("frames", (0, 2, 300))
    cells = {
        "prompt": Cell("text", "a dog \U0001f415 and \u2028"),
        "words": Cell("texts", ["a", "b"]),
        "strength": Cell("number", 1.0),
        "seed": Cell("integer", 10**17),
        "control": Cell("video", None, ("\udcff.mp4",), (frames, ("fps", 16.0)), ([1] * 4,)),
        "frames": Cell("video", None, ("a", "b"), (frames,), ([1] * 4, [2] * 4), "folder"),
    }  # fmt: skip
    for most in (MOST_FORMS, 2):
        monkeypatch.setattr("dstrain.data.samples.MOST_FORMS", most)
        assert [*_kept(cells, cells, {})] == [cells, cells, {}]


def test_some_samples_are_a_sequence() -> None:
    rows = _kept(*({"seed": Cell("integer", number)} for number in range(5)))
    assert [cells["seed"].literal for cells in rows[1:4]] == [1, 2, 3]
    assert rows[-1]["seed"].literal == 4
