"""Stage 1: run the cached steps once for each distinct input, and store the cached values
in the feature cache.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dstrain.cache.store import (
    DIGESTS,
    LOG,
    MARKER,
    FeatureCache,
    ShardWriter,
    check_parts,
)
from dstrain.config.serialize import command_line
from dstrain.console import get_logger, logging_to_file, progress_bar, secrets
from dstrain.distributed.world import ProcessGroup
from dstrain.errors import StateError, UsageError, first_few, secret_error
from dstrain.graph.long_prompts import LongPrompt, noticing_long_prompts
from dstrain.graph.plan import Step
from dstrain.models.finite import has_nan
from dstrain.pipeline.pipeline import Pipeline
from dstrain.randomness import SampleKey
from dstrain.runs.feature_plan import dataset_folders
from dstrain.runs.long_prompts import LongPromptLog, note_recorded, record
from dstrain.runs.resolve import log_warnings
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import LIST, read_samples, write_list
from dstrain.runs.stage_1.keyed_samples import (
    KeyedSample,
    KeyedSamples,
    Work,
    addresses_of,
    key_rows,
    missing_work,
)
from dstrain.runs.stage_1.plan_writer import name_in, write_plan
from dstrain.storage.files import lock, nameable
from dstrain.training.batching import MicroBatch
from dstrain.training.loader import DecodedSamples, load_batches

logger = get_logger(__name__)

REST = ("shards", "plans", LOG)
"""What stage 1 makes beside the marker before anything else."""


@dataclass(frozen=True)
class Loaded:
    """A pipeline that computes values."""

    pipeline: Pipeline
    components: Mapping[str, str]
    """Component -> digest of what it was loaded from."""


def data_process(setup: Setup, processes: ProcessGroup) -> None:
    """Fill the feature cache with everything that the rows of the datasets need; what is
    there already is not computed again.
    """
    with ExitStack() as stack:
        if processes.is_main:
            refuse_files(setup.cache_path)
            open_log = stack.enter_context(logging_to_file())
        read_samples(setup, processes)
        log_warnings(setup)
        for one in setup.datasets:
            refuse_secrets(one)
        if processes.is_main:
            stack.enter_context(lock(setup.cache_path))
            FeatureCache.create(setup.cache_path)
            open_log(setup.cache_path / LOG)
            write_list(setup)
        loaded = None
        for one in setup.datasets:
            loaded = fill(one, processes, loaded)
        if processes.is_main:
            logger.info(f"to train on it, run: {_stage_2(setup)}")
        processes.wait()


def fill(setup: Setup, processes: ProcessGroup, loaded: Loaded | None) -> Loaded | None:
    """Fill the feature cache with the values of one dataset, and write its plan.

    Returns what was loaded, if there was anything to compute: the next dataset needs the
    same, or components that only some rows use.
    """
    if processes.is_main:
        keyed = key_rows(setup)
        keyed.digests.save()
    # The main process first: the digests that it remembers need not be read again.
    processes.wait()
    if not processes.is_main:
        keyed = key_rows(setup)
    cache = FeatureCache.open(setup.cache_path)
    long_prompts = LongPromptLog(setup.config.on_long_prompt, setup.name_row)
    if setup.config.on_long_prompt == "error":
        note_recorded(long_prompts, setup.cache_path, addresses_of(keyed))
    work = list(missing_work(keyed.samples, cache))
    more = ", previews included," if keyed.previews else ""
    samples = setup.in_words("samples")
    logger.info(
        f"precomputing {len(work)} of {len(keyed.samples)} {samples}{more} into {setup.cache_path}"
    )
    # Before anyone adds to the cache, so that all list, and divide, the same work.
    processes.wait()
    if work:
        part = work[processes.rank :: processes.size]
        writer = ShardWriter(cache, setup.versions)
        loaded = _load(setup, keyed, loaded)
        compute(setup, loaded.pipeline, part, writer, long_prompts, processes.rank)
    processes.wait()
    if processes.is_main:
        # Also of rows that share a prompt, or whose values were there already.
        note_recorded(long_prompts, setup.cache_path, addresses_of(keyed))
        long_prompts.conclude()
        write_plan(setup, keyed)
    processes.wait()
    return loaded


def _load(setup: Setup, keyed: KeyedSamples, loaded: Loaded | None) -> Loaded:
    """Load the components of the samples, unless just these were loaded: keys say from
    which files values are, and files may have been replaced since.
    """
    found = keyed.found
    if (
        loaded is None
        or found.configs.keys() - loaded.pipeline.configs.keys()
        or any(
            loaded.components.get(name) != keyed.components[name]
            for name in found.files
        )
    ):
        pipeline = Pipeline.from_found(
            setup.family, setup.spec, found, setup.device, setup.dtype
        )
        loaded = Loaded(pipeline, keyed.components)
    for component in found.files.values():
        keyed.digests.check_unchanged(component.paths)
    return loaded


def _stage_2(setup: Setup) -> str:
    config = setup.config
    output = config.output_path
    if output is None or config.feature_cache is None:
        # DiffSynth-Studio's commands fill the output folder.
        cache = nameable(setup.cache_path)
        output = cache.with_name(f"{cache.name}-trained")
    return command_line(
        config,
        task=f"{config.task_name}:train",
        feature_cache=setup.cache_path,
        output_path=output,
    )


def refuse_files(folder: Path) -> None:
    """Raise StateError if stage 1 would replace a file in a folder that is not a cache,
    or write to a place outside of it.
    """
    check_parts(folder)
    # Without a marker, too: the advice for a damaged one is to delete it.
    if (folder / MARKER).exists() or all((folder / name).exists() for name in REST):
        return
    for name in (LIST, DIGESTS, LOG):
        if (folder / name).exists():
            raise StateError(
                folder,
                f"contains {name}, but is not a feature cache",
                "move it away, or give another --feature_cache",
            )


def refuse_secrets(setup: Setup) -> None:
    """Raise UsageError for rows with the value of a variable that is a secret: the cache
    would store it, and without it the row would be another.
    """
    dataset = setup.dataset
    folders = dataset_folders(setup.config)
    found: dict[str, list[str]] = {}
    for value, variable in secrets().items():
        for (row, _), cells in zip(dataset.sample_ids, dataset.rows, strict=True):
            for name, cell in cells.items():
                texts = [name_in(folders, file) for file in cell.files]
                texts.append(str(cell.literal))
                if any(value in text for text in texts):
                    place = dataset.table.where(row, name)
                    found.setdefault(variable, []).append(place)
    for variable, places in found.items():
        raise secret_error(first_few(places), variable)


def compute(
    setup: Setup,
    pipeline: Pipeline,
    part: Sequence[Work],
    writer: ShardWriter,
    log: LongPromptLog,
    rank: int,
) -> None:
    """Compute one process's part of the work, sample by sample, and commit it shard by
    shard.
    """
    ids = [work.sample.sample_id for work in part]
    source = DecodedSamples(
        [work.sample.cells for work in part],
        [work.inputs for work in part],
        ids,
        setup.dataset.damage,
    )
    keys = [SampleKey(0, 0, 0, *sample_id) for sample_id in ids]
    micro_batches = (MicroBatch((key,), (1.0,), 1, ends_step=True) for key in keys)
    batches = load_batches(source, micro_batches, setup.config.dataset_num_workers)
    with progress_bar("data_process", len(part)) as progress:
        try:
            for work, batch in zip(part, batches, strict=True):
                values = dict(batch.samples[0].values)
                with setup.dataset.errors_at(work.sample.sample_id[0]):
                    for step in work.steps:
                        compute_step(
                            setup, pipeline, step, work.sample, values, log, rank
                        )
                for name in work.values:
                    writer.add(work.sample.addresses[name], values[name])
                progress.update()
        finally:
            # What is computed is kept, whatever ended the loop.
            writer.flush()


def compute_step(
    setup: Setup,
    pipeline: Pipeline,
    step: Step,
    sample: KeyedSample,
    values: dict[str, Any],
    log: LongPromptLog,
    rank: int,
) -> None:
    """Run a unit for one sample; a prompt that it cuts is recorded with its outputs."""
    row, _ = sample.sample_id

    def notice(found: LongPrompt) -> None:
        if log.mode == "error":
            log.note(row, found)
        for name in step.outputs.values():
            if name in sample.addresses:
                record(setup.cache_path, rank, sample.addresses[name], found)

    with torch.no_grad(), noticing_long_prompts(notice):
        pipeline.run([step], values)
    for name, value in step.outputs.items():
        if has_nan(values[value]):
            raise UsageError(
                f"unit {step.unit.name}",
                f"output {name!r} contains NaN; it is not stored",
                *pipeline.damaged(step.unit.components),
            )
