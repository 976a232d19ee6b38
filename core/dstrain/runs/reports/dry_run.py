"""What `--dry_run` says beside the plan: the rows and steps of the run, what it would
refuse, and the flags given.
"""

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dstrain.config.fields import flags, split_commas
from dstrain.config.schema import options_affecting
from dstrain.config.serialize import as_flags
from dstrain.console import redacted
from dstrain.data.dataset import find_metadata
from dstrain.data.metadata import read_metadata
from dstrain.errors import StateError
from dstrain.runs.checkpoints.directory import refuse_unlisted
from dstrain.runs.checkpoints.resume import check_start
from dstrain.runs.setup import Setup


def as_summary(setup: Setup) -> str:
    """Describe the run on a page of text; needs the metadata, but no images or model
    files.

    Raises UsageError for rows of the metadata that a run would refuse, and for a preset
    LoRA that does not fit.
    """
    lines = ["", "this run", *_training(setup), *_rows(setup)]
    refused = list(_refused(setup))
    lines += ["", "not ready on this machine", *refused] if refused else []
    lines += ["", "flags that are not at their default", *_given(setup)]
    return redacted("\n".join(lines) + "\n")


def _training(setup: Setup) -> Iterator[str]:
    config = setup.config
    yield f"    device {setup.device}, mixed precision {setup.mixed_precision}"
    for name in setup.trainables.full:
        yield f"    trains {name} in full"
    for lora_config in setup.trainables.lora:
        targets = ", ".join(lora_config.targets)
        size = f"rank {lora_config.rank}, alpha {lora_config.alpha:g}"
        yield f"    trains LoRA on {lora_config.component}, {size}, of {targets}"
    place = config.feature_cache if setup.stage == "data_process" else None
    yield f"    writes {place or config.output_path or 'nothing: --output_path is not given'}"


def _rows(setup: Setup) -> Iterator[str]:
    """Rows as the metadata has them; files are not opened, so what their sizes do to
    batches is not known.
    """
    config = setup.config
    rows = None
    if config.dataset_base_path is not None and setup.stage != "train":
        path = config.dataset_metadata_path or find_metadata(config.dataset_base_path)
        table = read_metadata(path)
        if config.on_bad_sample == "error":
            table.refuse(table.faults)
        rows = len(table.rows) - len({fault.row for fault in table.faults})
        told = f"{rows} rows in {path} x {config.dataset_repeat}; their files are not opened"
        yield f"    {told if rows else f'no rows yet in {path}'}"
    if setup.stage == "data_process":
        return
    batch = (
        config.batch_size
        * config.gradient_accumulation_steps
        * int(os.environ.get("WORLD_SIZE", "1"))
    )
    yield f"    samples a step: {batch}"
    if config.num_epochs is None and config.max_steps is not None:
        yield f"    {config.max_steps} steps"
    elif rows:
        steps = math.ceil(rows * config.dataset_repeat / batch) * (
            config.num_epochs or 1
        )
        most = (
            f", of which {config.max_steps} are made at most"
            if config.max_steps is not None
            else ""
        )
        yield f"    {steps} steps{most}; more where rows differ in size, or a row gives several clips"


def _refused(setup: Setup) -> Iterator[str]:
    """Files that flags name and are not here, and an output folder that holds another
    run, or files of the user's.
    """
    config = setup.config
    for name in options_affecting("weights"):
        given = getattr(config, name)
        if given is not None and not given.exists():
            lacking = (
                path for path in split_commas(str(given)) if not Path(path).exists()
            )
            yield from (f"    --{name}: {path} does not exist" for path in lacking)
    checks: list[Callable[[], object]] = [
        model.files for model in setup.models if model.path is not None
    ]
    if config.preset_lora_path is not None and config.preset_lora_path.exists():
        checks.append(lambda: setup.preset)
    writes = config.output_path if setup.stage != "data_process" else None
    if writes is not None:
        checks.append(partial(refuse_unlisted, writes))
        checks.append(partial(check_start, config, writes))
    for check in checks:
        try:
            check()
        except StateError as error:
            yield from (
                f"    {error.where}: {error.what}",
                *(f"      {line}" for line in error.help_lines),
            )


def _given(setup: Setup) -> Iterator[str]:
    defaults = {
        flag.name: list(flag.default) if flag.many else flag.default
        for flag in flags(type(setup.config))
    }
    for name, value in as_flags(setup.config).items():
        if value != defaults.get(name, []) and name != "dry_run":
            yield f"    --{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
