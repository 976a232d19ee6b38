"""--on_bad_sample skip: every file that a run reads is decoded once before it, and rows
that cannot be are left out.

A row is left out whole, whatever the reason: its cells, a header, damage that only
decoding finds. The rows that stay keep their numbers, and so their noise and their
order. What was left out is listed in a file.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.console import Progress
from dstrain.data.cells import Cell, load_cell
from dstrain.data.dataset import Dataset
from dstrain.data.metadata import Fault
from dstrain.errors import UsageError
from dstrain.graph.inputs import stored_kind
from dstrain.storage.files import write_json
from dstrain.storage.hashing import SETTLED, file_mark, hash_json

MEMORY = "decoded_files.json"
Reads = Callable[[frozenset[str]], frozenset[str]]
"""The inputs present in a sample -> those of them that the run reads."""


@dataclass(frozen=True)
class Memory:
    """Cells that could be decoded, remembered by their files' size, times and inode, in
    a file of `folder`.
    """

    folder: Path
    known: dict[str, list[Any]]

    @classmethod
    def of(cls, folder: Path) -> "Memory":
        """What earlier runs remembered; an unreadable memory is an empty one."""
        try:
            known = json.loads((folder / MEMORY).read_bytes())
        except (OSError, ValueError):
            known = None
        return cls(folder, known if isinstance(known, dict) else {})

    def save(self) -> None:
        """Write it; raises SystemFault."""
        write_json(self.folder / MEMORY, self.known)


def skip_undecodable(dataset: Dataset, reads: Reads, folder: Path) -> Dataset:
    """The data set without the rows of which a file that the run reads cannot be
    decoded; the reasons are in it.

    What an earlier run decoded, and did not change since, is not decoded again. Raises
    UsageError if no row is left.
    """
    memory = Memory.of(folder)
    asked = {key: (number, name) for number, name, key in _cells(dataset, reads)}
    marks = {
        key: _marks(dataset.rows[number][name]) for key, (number, name) in asked.items()
    }
    todo = [key for key in asked if memory.known.get(key) != marks[key]]
    found = _decode({key: dataset.rows[asked[key][0]][asked[key][1]] for key in todo})
    now = time.time_ns()
    for key in todo:
        settled = all(now - max(times) >= SETTLED for _, *times, _ in marks[key])
        if found[key] is None and settled:
            memory.known[key] = marks[key]
    faults: dict[Fault, None] = {}
    for number, name, key in _cells(dataset, reads):
        error = found.get(key)
        if error is not None:
            faults[dataset.fault(dataset.sample_ids[number][0], name, error)] = None
    if todo and folder.is_dir():
        memory.save()
    return dataset.without(faults)


def _cells(dataset: Dataset, reads: Reads) -> Iterator[tuple[int, str, str]]:
    """(sample, input, key) of every cell with files that the run reads."""
    for number, cells in enumerate(dataset.rows):
        for name in sorted(reads(frozenset(cells))):
            cell = cells[name]
            if cell.files:
                yield (
                    number,
                    name,
                    hash_json(
                        "cell", [stored_kind(cell.kind), cell.files, cell.parameters]
                    ),
                )


def _marks(cell: Cell) -> list[list[int]]:
    return [file_mark(file) for file in cell.files]


def _decode(cells: Mapping[str, Cell]) -> dict[str, UsageError | None]:
    """Decode each cell and forget it: its key -> what is wrong with it."""
    if not cells:
        return {}
    found: dict[str, UsageError | None] = {}
    is_first = (
        os.environ.get("RANK", "0") == "0"
    )  # the others have little to do, and nothing to say
    bar = Progress("check files", len(cells), enabled=is_first)
    with ThreadPoolExecutor(os.cpu_count() or 1) as readers, bar as progress:
        for key, error in zip(cells, readers.map(_fault, cells.values()), strict=True):
            found[key] = error
            progress.step()
    return found


def _fault(cell: Cell) -> UsageError | None:
    try:
        load_cell(cell)
    except UsageError as error:
        return error
    return None
