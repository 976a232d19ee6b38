"""Find the rows whose files cannot be decoded, before a run: --on_bad_sample skip.

A row is skipped as a whole. The rows that stay keep their numbers, and so their noise
and their order.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from dstrain.console import progress_bar
from dstrain.data.cells import Cell, load_cell
from dstrain.data.dataset import Dataset
from dstrain.errors import UsageError
from dstrain.storage.hashing import FileMemory, hash_json

MEMORY = ".decoded_files.json"


def skip_undecodable(
    dataset: Dataset,
    used_inputs: Callable[[frozenset[str]], frozenset[str]],
    folder: Path,
) -> Dataset:
    """Return the dataset without the rows that name a file which cannot be decoded.

    Raises UsageError if no row is left.

    Args:
        dataset: Checked rows; only the headers of their files were read.
        used_inputs: The inputs present in a sample -> those that the run decodes.
        folder: Where cells that could be decoded are remembered, so that the next run
            decodes only what changed.
    """
    cells: dict[str, Cell] = {}
    uses: list[tuple[int, str, str]] = []
    for (row, _), sample in zip(dataset.sample_ids, dataset.rows, strict=True):
        for name in sorted(used_inputs(frozenset(sample))):
            cell = sample[name]
            if cell.files:
                key = hash_json(
                    "checked cell", [cell.kind, cell.files, cell.parameters]
                )
                cells[key] = cell
                uses.append((row, name, key))
    memory = FileMemory(folder / MEMORY)
    errors: dict[str, UsageError] = {}

    def decode(key: str) -> None:
        cell = cells[key]
        marks = list(chain(*cell.marks))
        if memory.recall(key, marks) is None:
            try:
                load_cell(cell)
            except UsageError as error:
                errors[key] = error
            else:
                memory.remember(key, marks, True)

    with (
        ThreadPoolExecutor(os.cpu_count()) as threads,
        progress_bar("check files", len(cells)) as progress,
    ):
        for _ in threads.map(decode, cells):
            progress.update()
    if folder.is_dir():
        memory.save()
    faults = [
        dataset.fault(row, name, errors[key])
        for row, name, key in uses
        if key in errors
    ]
    return dataset.without(faults)
