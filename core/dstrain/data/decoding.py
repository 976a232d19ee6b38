"""Find the rows whose files cannot be decoded, before a run: --on_bad_sample skip.

A row is skipped as a whole. The rows that stay keep their numbers, and so their noise
and their order.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dstrain.console import progress_bar
from dstrain.data.cells import Cell, load_cell
from dstrain.data.dataset import Dataset
from dstrain.data.metadata import Fault
from dstrain.errors import UsageError
from dstrain.storage.hashing import FileMemory, file_mark, hash_json

MEMORY = "decoded_files.json"
UsedInputs = Callable[[frozenset[str]], frozenset[str]]
"""The inputs present in a sample -> those of them that the run uses."""


def skip_undecodable(
    dataset: Dataset, used_inputs: UsedInputs, folder: Path
) -> Dataset:
    """Return the dataset without the rows that name a file which cannot be decoded.

    Raises UsageError if no row is left.

    Args:
        dataset: Checked rows; only the headers of their files were read.
        used_inputs: Says which inputs of a sample the run decodes.
        folder: Where cells that could be decoded are remembered, so that the next run
            decodes only what changed.
    """
    uses = list(_files_used(dataset, used_inputs))
    cells = {key: dataset.rows[sample][name] for sample, name, key in uses}
    memory = FileMemory.remembered(folder / MEMORY)
    unknown: dict[str, list[int]] = {}
    for key, cell in cells.items():
        marks = [number for file in cell.files for number in file_mark(file)]
        if memory.recall(key, marks) is None:
            unknown[key] = marks
    errors = _decode({key: cells[key] for key in unknown})
    for key, marks in unknown.items():
        if errors[key] is None:
            memory.remember(key, marks, True)
    if folder.is_dir():
        memory.save()
    faults: list[Fault] = []
    for sample, name, key in uses:
        error = errors.get(key)
        if error is not None:
            row, _ = dataset.sample_ids[sample]
            faults.append(dataset.fault(row, name, error))
    return dataset.without(faults)


def _files_used(
    dataset: Dataset, used_inputs: UsedInputs
) -> Iterator[tuple[int, str, str]]:
    """Yield (sample, input, key) of every cell with files that the run decodes."""
    for sample, row in enumerate(dataset.rows):
        for name in sorted(used_inputs(frozenset(row))):
            cell = row[name]
            if cell.files:
                content = [cell.kind, cell.files, cell.parameters]
                yield sample, name, hash_json("cell", content)


def _decode(cells: Mapping[str, Cell]) -> dict[str, UsageError | None]:
    """Decode each cell and forget it: key -> why it cannot be decoded."""
    if not cells:
        return {}
    errors: dict[str, UsageError | None] = {}
    with (
        ThreadPoolExecutor(os.cpu_count() or 1) as threads,
        progress_bar("check files", len(cells)) as progress,
    ):
        results = threads.map(_decoding_error, cells.values())
        for key, error in zip(cells, results, strict=True):
            errors[key] = error
            progress.update()
    return errors


def _decoding_error(cell: Cell) -> UsageError | None:
    try:
        load_cell(cell)
    except UsageError as error:
        return error
    return None
