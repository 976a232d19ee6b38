"""Find the rows whose files cannot be decoded, before a run: --on_bad_sample skip.

A row is skipped as a whole. The rows that stay keep their numbers, and so their noise
and their order.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

from dstrain.console import progress_bar
from dstrain.data.cells import Cell, load_cell
from dstrain.data.dataset import Dataset
from dstrain.data.table import Fault
from dstrain.errors import UsageError
from dstrain.storage import ManyFiles, hash_json

MEMORY = ".decoded_files.npy"
SAMPLES_AT_ONCE = 4096


def skip_undecodable(
    dataset: Dataset,
    used_inputs: Callable[[frozenset[str]], frozenset[str]],
    folder: Path,
) -> Dataset:
    """Return the dataset without the rows that name a file which cannot be decoded.

    Raises UsageError if no row is left.

    Args:
        used_inputs: The inputs present in a sample -> those that the run decodes.
        folder: Where cells that could be decoded are remembered, so that the next run
            decodes only what changed.
    """
    memory = ManyFiles(folder / MEMORY)
    faults: list[Fault] = []

    def decode(cell: Cell) -> UsageError | None:
        try:
            load_cell(cell)
        except UsageError as error:
            return error
        return None

    with (
        ThreadPoolExecutor(os.cpu_count()) as threads,
        progress_bar("check files", len(dataset.rows)) as progress,
    ):
        samples = zip(dataset.sample_ids[:, 0].tolist(), dataset.rows, strict=True)
        while part := list(islice(samples, SAMPLES_AT_ONCE)):
            cells: dict[str, Cell] = {}
            uses: list[tuple[int, str, str]] = []
            for row, sample in part:
                for name in sorted(used_inputs(frozenset(sample))):
                    cell = sample[name]
                    if cell.files:
                        key = hash_json(
                            "checked cell", [cell.kind, cell.files, cell.parameters]
                        )
                        cells[key] = cell
                        uses.append((row, name, key))
            marks = {key: list(chain(*cell.marks)) for key, cell in cells.items()}
            new = [key for key in cells if memory.recall(key, marks[key]) is None]
            found = threads.map(decode, [cells[key] for key in new])
            errors = dict(zip(new, found, strict=True))
            for key, error in errors.items():
                if error is None:
                    memory.remember(key, marks[key])
            for row, name, key in uses:
                error = errors.get(key)
                if error is not None:
                    faults.append(dataset.fault(row, name, error))
            progress.update(len(part))
    if folder.is_dir():
        memory.save()
    return dataset.without(faults)
