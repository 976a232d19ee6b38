"""--on_bad_sample skip: every file that a run reads is decoded once before it, and rows that cannot be are left out.

A row is left out whole, whatever the reason: its cells, a header, damage that only decoding finds. The rows that stay
keep their numbers, and so their noise and their order. What was left out is listed in a file.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dstrain.cells import Cell, load_cell
from dstrain.dataset import Dataset
from dstrain.errors import SystemFault, UsageError
from dstrain.files import lock, write_file, write_json
from dstrain.keys import SETTLED, file_mark, hashed
from dstrain.metadata import Fault
from dstrain.progress import Progress

if TYPE_CHECKING:
    from dstrain.setup import Setup
    from dstrain.world import World

LIST = "bad_samples.jsonl"
MEMORY = "decoded_files.json"

Reads = Callable[[frozenset[str]], frozenset[str]]
"""The inputs present in a sample -> those of them that the run reads."""


@dataclass(frozen=True)
class Memory:
    """Cells that could be decoded, remembered by their files' size, times and inode, in a file of `folder`."""

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


def decodable(dataset: Dataset, reads: Reads, folder: Path) -> Dataset:
    """The data set without the rows of which a file that the run reads cannot be decoded; the reasons are in it.

    What an earlier run decoded, and did not change since, is not decoded again. Raises UsageError if no row is left.
    """
    memory = Memory.of(folder)
    asked = {key: (number, name) for number, name, key in _cells(dataset, reads)}
    marks = {key: _marks(dataset.rows[number][name]) for key, (number, name) in asked.items()}
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
            faults[dataset.fault(dataset.places[number][0], name, error)] = None
    if todo and folder.is_dir():
        memory.save()
    return dataset.without(faults)


def _cells(dataset: Dataset, reads: Reads) -> Iterator[tuple[int, str, str]]:
    """(sample, input, key) of every cell with files that the run reads."""
    for number, cells in enumerate(dataset.rows):
        for name in sorted(reads(frozenset(cells))):
            cell = cells[name]
            if cell.files:
                yield number, name, hashed("cell", [cell.kind, cell.files, cell.parameters])


def _marks(cell: Cell) -> list[list[int]]:
    return [file_mark(file) for file in cell.files]


def _decode(cells: Mapping[str, Cell]) -> dict[str, UsageError | None]:
    """Decode each cell and forget it: its key -> what is wrong with it."""
    if not cells:
        return {}
    found: dict[str, UsageError | None] = {}
    is_first = os.environ.get("RANK", "0") == "0"  # the others have little to do, and nothing to say
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


def read_samples(setup: "Setup", world: "World") -> None:
    """Read the data set; where files are decoded or fetched, one process does it, and the others find what it left.

    With --on_bad_sample skip, say how many rows are left out; raises SystemFault if the processes do not agree on them.
    """
    skips = setup.config.on_bad_sample == "skip"
    alone = skips or setup.config.url_cache is not None
    start = time.monotonic()
    if world.is_main and alone:
        with lock(list_folder(setup)) if skips else nullcontext():
            _ = setup.dataset
    if alone:
        world.wait()
    dataset = setup.dataset
    if skips:
        seen = _number([fault.row for fault in dataset.left_out]).to(world.accelerator.device)
        if world.total(seen) != world.size * seen:
            raise SystemFault(str(dataset.table.path), "its files are not the same for every process, or just changed")
        bad = len({fault.row for fault in dataset.left_out})
        where = f", listed in {list_folder(setup) / LIST}" if bad else ""
        seconds = time.monotonic() - start
        world.say(
            f"{bad} of {len(dataset.table.rows)} rows are left out{where}; the files were checked in {seconds:.1f} s"
        )


def _number(rows: list[int]) -> torch.Tensor:
    """A number that tells lists of rows apart, small enough that the sum over many processes is exact."""
    return torch.tensor(int(hashed("left out", rows)[:10], 16), dtype=torch.float64)


def list_folder(setup: "Setup") -> Path:
    """Where the list goes: --output_path, else the feature store's folder."""
    return setup.config.output_path or setup.store_path


def write_list(setup: "Setup") -> None:
    """List the rows that are left out, one JSON object a line: file, row, column, reason; raises SystemFault.

    A row has a line for each thing that is wrong with it; its number is that of messages. Without any, a list of an
    earlier run is removed. Stage 2, which reads no data set, leaves it.
    """
    if setup.stage == "train":
        return
    table, path = setup.dataset.table, list_folder(setup) / LIST
    lines = [
        {"file": table.path.name, "row": table.lines[fault.row], "column": fault.column, "reason": fault.reason}
        for fault in setup.dataset.left_out
    ]
    if lines:
        write_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
    else:
        path.unlink(missing_ok=True)
