"""Describe what a run would do and what it would refuse, for `--dry_run`."""

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dstrain.config.fields import split_commas
from dstrain.config.options import options_affecting
from dstrain.console import redacted
from dstrain.data.metadata import read_metadata
from dstrain.errors import StateError
from dstrain.runs.build import total_steps
from dstrain.runs.checkpoints.directory import refuse_unlisted
from dstrain.runs.checkpoints.resume import check_start
from dstrain.runs.setup import Setup, metadata_path


def as_summary(setup: Setup) -> str:
    """Describe the run on a page of text; needs the metadata, but no images or model
    files.

    Raises UsageError for rows of the metadata that a run would refuse, and for a preset
    LoRA that does not fit.
    """
    lines = ["", "this run", *_length(setup)]
    refused = list(_refused(setup))
    if refused:
        lines += ["", "not ready on this machine", *refused]
    return redacted("\n".join(lines) + "\n")


def _length(setup: Setup) -> Iterator[str]:
    """Yield rows and steps; files are not opened, so that their sizes are not known."""
    config = setup.config
    rows = 0
    path = metadata_path(config)
    if path is not None:
        table = read_metadata(path)
        if config.on_bad_sample == "error":
            table.refuse(table.faults)
        rows = len(table.rows) - len({fault.row for fault in table.faults})
        repeat = config.dataset_repeat
        yield f"    {rows} rows in {path} x {repeat}; their files are not opened"
    if setup.stage == "data_process":
        return
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = config.batch_size * config.gradient_accumulation_steps * processes
    yield f"    samples per step: {batch}"
    if rows:
        steps = total_steps(config, math.ceil(rows * config.dataset_repeat / batch))
        yield f"    {steps} steps, if each row is one sample and all have the same size"


def _refused(setup: Setup) -> Iterator[str]:
    """Yield files that flags name and are not here, and what is wrong with the output
    folder.
    """
    config = setup.config
    for name in options_affecting("weights"):
        for path in split_commas(str(getattr(config, name) or "")):
            if not Path(path).exists():
                yield f"    --{name}: {path} does not exist"
    checks: list[Callable[[], object]] = [
        model.files for model in setup.models if model.path is not None
    ]
    if config.preset_lora_path is not None and config.preset_lora_path.exists():
        checks.append(lambda: setup.preset)
    output = config.output_path
    if output is not None and setup.stage != "data_process":
        checks.append(partial(refuse_unlisted, output))
        checks.append(partial(check_start, config, output))
    for check in checks:
        try:
            check()
        except StateError as error:
            yield f"    {error.where}: {error.what}"
            yield from (f"      {line}" for line in error.help_lines)
