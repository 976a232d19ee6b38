"""Decode every row before a run, and list the rows that are skipped."""

import json
import time
from contextlib import nullcontext

import torch

from dstrain.console import get_logger
from dstrain.distributed.world import ProcessGroup
from dstrain.errors import SystemFault
from dstrain.runs.setup import Setup
from dstrain.storage.files import lock, write_file
from dstrain.storage.hashing import hash_json

logger = get_logger(__name__)


LIST = "bad_samples.jsonl"


def read_samples(setup: Setup, processes: ProcessGroup) -> None:
    """Read the dataset; where files are decoded or fetched, one process does it, and
    the others find what it left.

    With --on_bad_sample skip, say how many rows are left out; raises SystemFault if the
    processes do not agree on them.
    """
    skips = setup.config.on_bad_sample == "skip"
    alone = skips or setup.config.url_cache is not None
    start = time.monotonic()
    if processes.is_main and alone:
        with lock(setup.output) if skips else nullcontext():
            if skips:
                setup.list_folder.mkdir(exist_ok=True)
            _ = setup.dataset
    if alone:
        processes.wait()
    dataset = setup.dataset
    if skips:
        seen = _number([fault.row for fault in dataset.skipped]).to(
            processes.accelerator.device
        )
        if processes.total(seen) != processes.size * seen:
            raise SystemFault(
                str(dataset.table.path),
                "its files are not the same for every process, or just changed",
            )
        bad = len({fault.row for fault in dataset.skipped})
        where = f", listed in {setup.list_folder / LIST}" if bad else ""
        seconds = time.monotonic() - start
        logger.info(
            f"{bad} of {len(dataset.table.rows)} rows are left out{where}; the files were checked in {seconds:.1f} s"
        )


def _number(rows: list[int]) -> torch.Tensor:
    """Return a number that tells lists of rows apart, small enough that the sum over
    many processes is exact.
    """
    return torch.tensor(int(hash_json("left out", rows)[:10], 16), dtype=torch.float64)


def write_list(setup: Setup) -> None:
    """List the rows that are left out, one JSON object a line: file, row, column,
    reason; raises SystemFault.

    A row has a line for each thing that is wrong with it; its number is that of
    messages. Without any, a list of an earlier run is removed. Stage 2, which reads no
    dataset, leaves it.
    """
    if setup.stage == "train":
        return
    table, path = setup.dataset.table, setup.list_folder / LIST
    lines = [
        {
            "file": table.path.name,
            "row": table.lines[fault.row],
            "column": fault.column,
            "reason": fault.reason,
        }
        for fault in setup.dataset.skipped
    ]
    if lines:
        write_file(
            path,
            "".join(
                json.dumps(line, ensure_ascii=False) + "\n" for line in lines
            ).encode(),
        )
    else:
        path.unlink(missing_ok=True)
