"""Stage 1: run the cached steps once for each distinct input, and store the cached values
in the feature cache.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dstrain.cache.keys import value_keys
from dstrain.cache.store import (
    DIGESTS,
    LOG,
    MARKER,
    FeatureCache,
    ShardWriter,
    check_parts,
)
from dstrain.config.serialize import command_line
from dstrain.console import (
    get_logger,
    logging_to_file,
    progress_bar,
    redacted,
    secrets,
)
from dstrain.data.cells import Cell, input_key
from dstrain.data.files import real_path
from dstrain.distributed.world import ProcessGroup
from dstrain.errors import StateError, UsageError, first_few, secret_error
from dstrain.graph.long_prompts import LongPrompt, noticing_long_prompts
from dstrain.graph.plan import Plan, Step
from dstrain.graph.values import serialize
from dstrain.models.component_files import named_models
from dstrain.models.finite import has_nan
from dstrain.models.needed_components import Found, component_digests
from dstrain.pipeline.pipeline import Pipeline
from dstrain.randomness import SampleKey
from dstrain.runs.feature_plan import CacheInfo, dataset_folders, names_digest
from dstrain.runs.long_prompts import LongPromptLog, note_recorded, record
from dstrain.runs.plan_identity import plan_identity
from dstrain.runs.reports.preview_plans import PreviewPlan, plan_previews, preview_line
from dstrain.runs.resolve import log_warnings
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import LIST, read_samples, write_list
from dstrain.storage.files import lock
from dstrain.storage.hashing import Digests, files_in, hash_json, sha256
from dstrain.training.batching import MicroBatch
from dstrain.training.loader import DecodedSamples, load_batches

logger = get_logger(__name__)

REST = ("shards", "plans", LOG)
"""What stage 1 makes beside the marker before anything else."""


@dataclass(frozen=True, slots=True)
class KeyedSample:
    """A sample of the dataset, or the inputs of a preview."""

    sample_id: tuple[int, int]
    """Its row and chunk."""
    cells: Mapping[str, Cell]
    plan: Plan
    addresses: Mapping[str, str]
    """Cached value -> its key; inputs that are not files have none."""


@dataclass(frozen=True)
class KeyedSamples:
    """All samples with the keys of their values, and what the keys were made from."""

    found: Found
    components: Mapping[str, str]
    """Component -> digest of its files, its configuration and the family's code for it."""
    digests: Digests
    samples: Sequence[KeyedSample]
    """Those of the dataset, then one for each preview."""
    previews: Sequence[PreviewPlan]


@dataclass(frozen=True)
class Work:
    """The values of a sample that the cache lacks, and what computes them."""

    sample: KeyedSample
    values: Sequence[str]
    steps: Sequence[Step]
    inputs: frozenset[str]
    """The inputs that these steps use."""


def data_process(setup: Setup, processes: ProcessGroup) -> None:
    """Fill the feature cache with everything that the dataset's rows need; what is
    there already is not computed again.
    """
    with ExitStack() as stack:
        if processes.is_main:
            refuse_files(setup.cache_path)
            open_log = stack.enter_context(logging_to_file())
        read_samples(setup, processes)
        log_warnings(setup)
        refuse_secrets(setup)
        if processes.is_main:
            stack.enter_context(lock(setup.cache_path))
            FeatureCache.create(setup.cache_path)
            open_log(setup.cache_path / LOG)
            write_list(setup)
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
        logger.info(
            f"precomputing {len(work)} of {len(keyed.samples)} samples{more} into {setup.cache_path}"
        )
        # Before anyone adds to the cache, so that all list, and divide, the same work.
        processes.wait()
        if work:
            part = work[processes.rank :: processes.size]
            writer = ShardWriter(cache, setup.versions)
            compute(setup, keyed, part, writer, long_prompts, processes.rank)
        processes.wait()
        if processes.is_main:
            # Also of rows that share a prompt, or whose values were there already.
            note_recorded(long_prompts, setup.cache_path, addresses_of(keyed))
            long_prompts.conclude()
            write_plan(setup, keyed)
            logger.info(f"to train on it, run: {_stage_2(setup)}")
        processes.wait()


def _stage_2(setup: Setup) -> str:
    config = setup.config
    output = config.output_path
    if output is None or config.feature_cache is None:
        # DiffSynth-Studio's commands fill the output folder.
        output = setup.cache_path.with_name(f"{setup.cache_path.name}-trained")
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
                texts = [_name_in(folders, file) for file in cell.files]
                texts.append(str(cell.literal))
                if any(value in text for text in texts):
                    place = dataset.table.where(row, name)
                    found.setdefault(variable, []).append(place)
    for variable, places in found.items():
        raise secret_error(first_few(places), variable)


def key_rows(setup: Setup) -> KeyedSamples:
    """Find the components, and the keys of all samples before anything is decoded.

    Reads every file that changed since it was last read.
    """
    dataset = setup.dataset
    previews = plan_previews(setup)
    input_sets = dict.fromkeys(frozenset(cells) for cells in dataset.rows)
    plans = [setup.plan(inputs) for inputs in input_sets]
    found = setup.find([*plans, *(preview.plan for preview in previews)])
    digests = Digests(setup.cache_path / DIGESTS)
    components = component_digests(found, digests)
    for name in found.files:
        code = setup.component_code(name)
        components[name] = hash_json("component", [components[name], code])
    experts = setup.spec.experts
    if experts is not None:
        # Units ask for the configuration by the name of the denoiser.
        for expert in experts.components:
            if f"{expert}_config" in components:
                digest = components[f"{expert}_config"]
                components.setdefault(f"{experts.denoiser}_config", digest)

    def keyed_sample(
        sample_id: tuple[int, int],
        cells: Mapping[str, Cell],
        plan: Plan,
    ) -> KeyedSample:
        inputs = {name: input_key(cells[name], digests) for name in plan.used_inputs}
        keys = value_keys(plan, inputs, components, str(setup.dtype))
        addresses = {
            name: keys[name]
            for name in plan.cached_values
            if name not in cells or cells[name].files
        }
        return KeyedSample(sample_id, cells, plan, addresses)

    samples = [
        keyed_sample(sample_id, cells, setup.plan(frozenset(cells)))
        for sample_id, cells in zip(dataset.sample_ids, dataset.rows, strict=True)
    ]
    # Previews come last, as rows that the table does not have.
    for row, preview in enumerate(previews, len(dataset.table.rows)):
        samples.append(keyed_sample((row, 0), preview.cells, preview.plan))
    return KeyedSamples(found, components, digests, samples, previews)


def missing_work(samples: Sequence[KeyedSample], cache: FeatureCache) -> Iterator[Work]:
    """Yield the samples to compute, each value for the first sample that needs it."""
    claimed: set[str] = set()
    for sample in samples:
        values = [
            name
            for name, address in sample.addresses.items()
            if address not in cache and address not in claimed
        ]
        if not values:
            continue
        claimed.update(sample.addresses[name] for name in values)
        needed = set(values)
        steps: list[Step] = []
        for step in reversed(sample.plan.cached_steps):
            if needed & set(step.outputs.values()):
                steps.insert(0, step)
                needed |= set(step.inputs.values())
        yield Work(sample, values, steps, frozenset(needed & sample.plan.inputs))


def compute(
    setup: Setup,
    keyed: KeyedSamples,
    part: Sequence[Work],
    writer: ShardWriter,
    log: LongPromptLog,
    rank: int,
) -> None:
    """Compute one process's part of the work, sample by sample, and commit it shard by
    shard.
    """
    pipeline = Pipeline.from_found(
        setup.family, setup.spec, keyed.found, setup.device, setup.dtype
    )
    for component in keyed.found.files.values():
        keyed.digests.check_unchanged(component.paths)
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


def addresses_of(keyed: KeyedSamples) -> Iterator[tuple[int, Collection[str]]]:
    """Yield the row of each sample with the addresses of its values."""
    for sample in keyed.samples:
        yield sample.sample_id[0], sample.addresses.values()


def write_plan(setup: Setup, keyed: KeyedSamples) -> None:
    """Commit the plan that stage 2 trains from."""
    cache = FeatureCache.open(setup.cache_path)
    table = setup.dataset.table
    count = len(setup.dataset.rows)
    samples = keyed.samples[:count]
    input_sets = list(dict.fromkeys(sample.plan.inputs for sample in samples))
    dataset = {
        "path": redacted(str(table.path.resolve())),
        "sha256": sha256(table.path),
        "rows": len(table.rows),
        "folders": [redacted(folder) for folder in dataset_folders(setup.config)],
    }
    info = CacheInfo(
        dataset=dataset,
        columns=table.columns,
        inputs=[sorted(inputs) for inputs in input_sets],
        components=keyed.components,
        configs=keyed.found.configs,
        models=named_models(setup.family, setup.models),
        files={
            name: [
                (redacted(os.path.abspath(file)), place, keyed.digests.record(file))
                for place, file in files_in(files.paths)
            ]
            for name, files in keyed.found.files.items()
        },
        versions=setup.versions,
        previews=[
            preview_line(preview, sample.addresses)
            for preview, sample in zip(
                keyed.previews, keyed.samples[count:], strict=True
            )
        ],
    )
    lines = plan_lines(setup, keyed, samples, input_sets, cache)
    identity = plan_identity(setup, input_sets, keyed.found.configs)
    cache.write_plan(identity, asdict(info), lines)


def plan_lines(
    setup: Setup,
    keyed: KeyedSamples,
    samples: Sequence[KeyedSample],
    input_sets: Sequence[frozenset[str]],
    cache: FeatureCache,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the plan file, one per sample; `inputs` and `group` number the
    set of inputs and the signature. A file is recorded in the first line that uses it.
    """
    folders = dataset_folders(setup.config)
    seen = {""}
    for sample, group in zip(samples, setup.dataset.groups, strict=True):
        row, chunk = sample.sample_id
        values = {
            name: serialize(sample.cells[name].literal, {}, name)
            for name in sample.plan.cached_values
            if name not in sample.addresses
        }
        for name, address in sample.addresses.items():
            values[name] = {"at": address, "shapes": shapes(cache.header(address))}
        files = []
        frame_folders = []
        for name in sorted(sample.plan.used_inputs):
            cell = sample.cells[name]
            for file in cell.files:
                if file not in seen:
                    seen.add(file)
                    files.append((_name_in(folders, file), keyed.digests.record(file)))
            if cell.folder not in seen:
                seen.add(cell.folder)
                place = _name_in(folders, cell.folder)
                frame_folders.append((place, names_digest(Path(cell.folder))))
        yield {
            "row": row,
            "line": setup.dataset.table.lines[row],
            "chunk": chunk,
            "inputs": input_sets.index(sample.plan.inputs),
            "group": group,
            "values": values,
            "files": files,
            "frame folders": frame_folders,
        }


def _name_in(folders: Sequence[str], path: str) -> str:
    """Return a file's name in one of the folders, under which it is found when they moved."""
    # An absolute name in the metadata may lead through links, or upwards, to a folder.
    # Looked up only then: each look-up takes time, and may fail.
    for find in (str, real_path):
        place = find(path)
        for folder in folders:
            start = os.path.join(folder, "")
            if place.startswith(start) and ".." not in Path(place).parts:
                return place.removeprefix(start)
    return path


def shapes(header: Any) -> Any:
    """Return the shapes of a stored value's tensors, from its header."""
    if "shape" in header:
        return header["shape"]
    children = header.get("list") or header.get("record", {}).values()
    return [shapes(child) for child in children]
