"""What `--dry_run` says beside the plan: the rows and steps of the run, and the flags that were given."""

import math
import os
from collections.abc import Iterator

from dstrain.dataset import find_metadata
from dstrain.flags import flags
from dstrain.metadata import read_metadata
from dstrain.redaction import redacted
from dstrain.resolved import as_flags
from dstrain.setup import Setup


def as_summary(setup: Setup) -> str:
    """A page of text; needs the metadata, but neither pictures nor model files, and no data set in stage 2."""
    lines = ["", "this run", *_training(setup), *_rows(setup)]
    lines += ["", "flags that are not at their default", *_given(setup)]
    return redacted("\n".join(lines) + "\n")


def _training(setup: Setup) -> Iterator[str]:
    config = setup.config
    yield f"    device {setup.device}, mixed precision {setup.mixed_precision}"
    for name in setup.trainables.full:
        yield f"    trains {name} in full"
    for spec in setup.trainables.lora:
        targets = ", ".join(spec.targets)
        yield f"    trains LoRA on {spec.component}, rank {spec.rank}, alpha {spec.alpha:g}, of {targets}"
    place = config.feature_cache if setup.stage == "data_process" else None
    yield f"    writes {place or config.output_path or 'nothing: --output_path is not given'}"


def _rows(setup: Setup) -> Iterator[str]:
    """Rows as the metadata has them; files are not opened, so what their sizes do to batches is not known."""
    config = setup.config
    rows = None
    if config.dataset_base_path is not None and setup.stage != "train":
        path = config.dataset_metadata_path or find_metadata(config.dataset_base_path)
        rows = len(read_metadata(path).rows)
        yield f"    {rows} rows in {path} x {config.dataset_repeat}; their files are not opened"
    if setup.stage == "data_process":
        return
    batch = config.batch_size * config.gradient_accumulation_steps * int(os.environ.get("WORLD_SIZE", "1"))
    yield f"    samples a step: {batch}"
    if config.num_epochs is None and config.max_steps is not None:
        yield f"    {config.max_steps} steps"
    elif rows is not None:
        steps = math.ceil(rows * config.dataset_repeat / batch) * (config.num_epochs or 1)
        most = f", of which {config.max_steps} are made at most" if config.max_steps is not None else ""
        yield f"    {steps} steps{most}; more where rows differ in size, or a row gives several clips"


def _given(setup: Setup) -> Iterator[str]:
    defaults = {flag.name: list(flag.default) if flag.many else flag.default for flag in flags(type(setup.config))}
    for name, value in as_flags(setup.config).items():
        if value != defaults.get(name, []) and name != "dry_run":
            yield f"    --{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
