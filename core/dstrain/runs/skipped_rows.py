"""Decode every row before a run, and list the rows that are skipped."""

import json
from contextlib import nullcontext

import torch

from dstrain.console import get_logger, redacted
from dstrain.distributed import ProcessGroup
from dstrain.errors import SystemFault
from dstrain.runs.setup import Setup
from dstrain.storage import BAD_SAMPLES, lock, write_file

logger = get_logger(__name__)


def read_samples(setup: Setup, processes: ProcessGroup) -> None:
    """Read the datasets; where files are decoded, fetched or written, one process does
    it, and the others find what it left.

    With --on_bad_sample skip, log how many rows are skipped; raises SystemFault if the
    processes do not agree on them.
    """
    for one in setup.datasets:
        _read(one, processes)


def _read(setup: Setup, processes: ProcessGroup) -> None:
    skips = setup.config.on_bad_sample == "skip"
    data = [part.setup.data_config for part in setup.parts]
    is_written = any(one.source.has_contents or one.fetches for one in data)
    if skips or is_written:
        if processes.is_main:
            with lock(setup.output) if skips else nullcontext():
                if skips:
                    setup.list_folder.mkdir(exist_ok=True)
                # Opened here, with the lock held: the others find what it leaves.
                _ = setup.dataset
        processes.wait()
    dataset = setup.dataset
    if not skips:
        return
    skipped = torch.zeros(len(dataset.table.rows), device=setup.device)
    skipped[[fault.row for fault in dataset.skipped]] = 1
    if not torch.equal(processes.total(skipped), processes.size * skipped):
        what = "its files differ between processes, or have just changed"
        raise SystemFault(dataset.table.path, what)
    count = int(skipped.sum())
    where = f", listed in {setup.list_folder / BAD_SAMPLES}" if count else ""
    rows = setup.in_words("rows")
    logger.info(f"{count} of {len(skipped)} {rows} are skipped{where}")


def write_list(setup: Setup) -> None:
    """List the rows that are skipped, one JSON object a line: file, row, column,
    reason; raises SystemFault.

    A row has a line for each thing that is wrong with it; its number is that of
    messages. Without any, a list of an earlier run is removed. Stage 2, which reads no
    dataset, leaves it.
    """
    if setup.stage == "train":
        return
    path = setup.list_folder / BAD_SAMPLES
    lines = []
    for one in setup.datasets:
        for fault in one.dataset.skipped:
            part, row = one.row_of_part(fault.row)
            table = part.checked_dataset.table
            line = {
                "file": table.path.name,
                "row": int(table.lines[row]),
                "column": fault.column,
                "reason": redacted(fault.reason),
            }
            if one.is_validation:
                line["dataset"] = "validation"
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    if lines:
        write_file(path, "".join(lines).encode())
    else:
        path.unlink(missing_ok=True)
