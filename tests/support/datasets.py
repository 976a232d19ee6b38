"""Datasets that tests write, and open as a run does."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.data import DataConfig, Dataset, Resolution
from dstrain.data.row_checks import open_dataset
from dstrain.graph import Input

OWN_SIZES = Resolution(None, None, 2**20)
"""Each image has its own size, up to a megapixel."""
Rows = str | Sequence[Mapping[str, Any]] | None
"""A table as the text of a csv or as records; None for what the folder has itself."""


def open_rows(
    folder: Path,
    rows: Rows,
    inputs: Mapping[str, Input],
    check_inputs: Any = None,
    **settings: Any,
) -> Dataset:
    """Write a table into a folder, in place of the one there, and open the dataset."""
    if rows is not None:
        names = ["metadata.csv", "metadata.json"]
        is_csv = isinstance(rows, str)
        (folder / names[is_csv]).unlink(missing_ok=True)
        text = rows if isinstance(rows, str) else json.dumps(rows)
        (folder / names[not is_csv]).write_text(text)
    given = {"metadata_path": None, "file_keys": None, "resolution": OWN_SIZES}
    config = DataConfig(folder, **given | settings)
    return open_dataset(config, inputs, check_inputs)


def refusal(
    folder: Path, rows: Rows, inputs: Mapping[str, Input], *check: Any, **settings: Any
) -> UsageError:
    """Open a dataset that is refused; return the error."""
    with pytest.raises(UsageError) as refused:
        open_rows(folder, rows, inputs, *check, **settings)
    return refused.value


def bad_cells(
    folder: Path, rows: Rows, inputs: Mapping[str, Input], *check: Any, **settings: Any
) -> dict[str, str]:
    """Open a dataset that is refused; return what is wrong by its place."""
    return faults(refusal(folder, rows, inputs, *check, **settings))


def faults(error: UsageError) -> dict[str, str]:
    """What an error says is wrong, by its place."""
    lines = [line.strip().partition(": ") for line in error.help_lines]
    return {place: reason for place, colon, reason in lines if colon}
