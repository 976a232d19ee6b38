"""Stage 1: run the frozen units once per different input and put what crosses into the
feature cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dstrain.cache.keys import value_keys
from dstrain.cache.store import FeatureCache, ShardWriter
from dstrain.console import get_logger, progress_bar
from dstrain.data.cells import Cell, input_key
from dstrain.distributed.world import ProcessGroup
from dstrain.graph.plan import Plan, Step
from dstrain.graph.values import serialize
from dstrain.models.locate import Found, component_digests
from dstrain.pipeline.pipeline import Pipeline
from dstrain.randomness import SampleKey
from dstrain.runs.feature_plan import cache_info, plan_identity
from dstrain.runs.reports.preview_plans import PreviewPlan, plan_previews, preview_line
from dstrain.runs.resolve import log_warnings
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import read_samples, write_list
from dstrain.storage.files import lock
from dstrain.storage.hashing import Digests
from dstrain.training.loader import DecodedSamples, load_batches
from dstrain.training.order import MicroBatch

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Where the crossing values of one row are or will be: value -> address. Inputs
    that are no files have none.
    """

    plan: Plan
    addresses: Mapping[str, str]


@dataclass(frozen=True)
class Keyed:
    """The keys of the data set's rows and of what `previews` need, and what the keys
    were made from.
    """

    found: Found
    components: Mapping[str, str]
    digests: Digests
    rows: Sequence[RowKeys]
    previews: tuple[PreviewPlan, ...]
    preview_rows: Sequence[RowKeys]

    @property
    def all_rows(self) -> list[RowKeys]:
        """The keys of every sample."""
        return [*self.rows, *self.preview_rows]


@dataclass(frozen=True)
class Work:
    """A sample with values the store lacks: the steps to run, the inputs to decode for
    them, the values wanted.
    """

    sample: int
    steps: tuple[Step, ...]
    inputs: frozenset[str]
    wanted: tuple[str, ...]


def data_process(setup: Setup, processes: ProcessGroup) -> None:
    """Fill the store with everything the data set's rows need; what is there already is
    not computed again.
    """
    read_samples(setup, processes)
    log_warnings(setup)
    if processes.is_main:
        with lock(setup.cache_path):
            FeatureCache.create(setup.cache_path)
            write_list(setup)
            keyed = key_rows(setup)
            keyed.digests.save()
            processes.wait()
            _fill(setup, processes, keyed)
    else:
        processes.wait()  # the main process first: what it remembers of files need not be read again
        _fill(setup, processes, key_rows(setup))


def _fill(setup: Setup, processes: ProcessGroup, keyed: Keyed) -> None:
    store = FeatureCache.open(setup.cache_path)
    work = list(missing_work(keyed.all_rows, store))
    samples = len(keyed.all_rows)
    more = ", previews included," if keyed.previews else ""
    logger.info(
        f"Precomputing {len(work)} of {samples} samples{more} into {setup.cache_path}"
    )
    processes.wait()  # before anyone adds to the store, so that all list, and divide, the same work
    if work:
        pipeline = Pipeline.from_found(
            setup.family,
            setup.spec,
            keyed.found,
            setup.device,
            setup.dtype,
        )
        for files in keyed.found.files.values():
            keyed.digests.check_unchanged(files.paths)
        part = work[processes.rank :: processes.size]
        progress = progress_bar("data_process", len(part))
        writer = ShardWriter(store, setup.versions)
        compute(setup, pipeline, writer, part, keyed, progress)
    processes.wait()
    if processes.is_main:
        store = FeatureCache.open(setup.cache_path)
        presence = tuple(dict.fromkeys(keys.plan.inputs for keys in keyed.rows))
        previews = [
            preview_line(preview, keys.addresses)
            for preview, keys in zip(keyed.previews, keyed.preview_rows, strict=True)
        ]
        info = cache_info(setup, keyed.found, keyed.components, presence, previews)
        lines = plan_lines(setup, keyed.rows, store, presence)
        store.write_plan(plan_identity(setup), info.to_json(), lines)
    processes.wait()


def key_rows(setup: Setup) -> Keyed:
    """Find the components, and the keys of all rows; reads every file that changed
    since it was last read.
    """
    digests = Digests.remembered(setup.cache_path / "digests.json")
    previews = plan_previews(setup)
    found = find_components(setup, [preview.plan for preview in previews])
    components = component_digests(found, digests)
    experts = setup.spec.experts
    if experts is not None:
        for part in experts.components:
            if (
                f"{part}_config" in components
            ):  # units borrow it by the name of the role
                components.setdefault(
                    f"{experts.denoiser}_config", components[f"{part}_config"]
                )
    rows = row_keys(setup, components, digests)
    copy_if_shared = [
        keys_of(preview.plan, preview.cells, components, digests, setup)
        for preview in previews
    ]
    return Keyed(found, components, digests, rows, previews, copy_if_shared)


def find_components(setup: Setup, others: Sequence[Plan] = ()) -> Found:
    """Find the files stage 1 needs: the union over the rows' plans, and others."""
    rows = [
        setup.plan(inputs)
        for inputs in dict.fromkeys(frozenset(cells) for cells in setup.dataset.rows)
    ]
    plans = [*rows, *others]
    components = dict.fromkeys(
        name for plan in plans for name in plan.components["data_process"]
    )
    configs = dict.fromkeys(
        name for plan in plans for name in plan.configs["data_process"]
    )
    return setup.find(components, configs)


def row_keys(
    setup: Setup, components: Mapping[str, str], digests: Digests
) -> list[RowKeys]:
    """Return the keys of every row, known before anything is decoded."""
    plan_of = cache(setup.plan)
    return [
        keys_of(plan_of(frozenset(cells)), cells, components, digests, setup)
        for cells in setup.dataset.rows
    ]


def keys_of(
    plan: Plan,
    cells: Mapping[str, Cell],
    components: Mapping[str, str],
    digests: Digests,
    setup: Setup,
) -> RowKeys:
    """Return the keys of one sample with these inputs."""
    inputs = {name: input_key(cells[name], digests) for name in plan.used_inputs}
    keys = value_keys(plan, inputs, components, str(setup.dtype))
    stored = [
        name for name in plan.cached_values if name not in cells or cells[name].files
    ]
    return RowKeys(plan, {name: keys[name] for name in stored})


def missing_work(rows: Sequence[RowKeys], store: FeatureCache) -> Iterator[Work]:
    """Yield the samples to compute.

    Each value of the dataset is computed once, for the first sample that needs it.
    """
    claimed: set[str] = set()
    for sample, keys in enumerate(rows):
        wanted = tuple(
            name
            for name, at in keys.addresses.items()
            if at not in store and at not in claimed
        )
        if wanted:
            claimed.update(keys.addresses[name] for name in wanted)
            needed = set(wanted)
            steps: list[Step] = []
            for step in reversed(keys.plan.cached_steps):
                if needed & set(step.outputs.values()):
                    steps.insert(0, step)
                    needed |= set(step.inputs.values())
            yield Work(
                sample, tuple(steps), frozenset(needed & keys.plan.inputs), wanted
            )


def compute(
    setup: Setup,
    pipeline: Pipeline,
    writer: ShardWriter,
    part: Sequence[Work],
    keyed: Keyed,
    progress: Any,
) -> None:
    """Compute one process's part of the work, row by row, and commit it shard by shard."""
    rows, sample_ids = _samples(setup, keyed.previews)
    all_keys = keyed.all_rows
    ids_of_part = [sample_ids[work.sample] for work in part]
    source = DecodedSamples(
        [rows[work.sample] for work in part],
        [work.inputs for work in part],
        ids_of_part,
        setup.dataset.damage,
    )

    keys = (SampleKey(0, 0, 0, *sample_id) for sample_id in ids_of_part)
    micro_batches = (MicroBatch((key,), (1.0,), 1, ends_step=True) for key in keys)
    batches = load_batches(source, micro_batches, setup.config.dataset_num_workers)
    with progress:
        for work, batch in zip(part, batches, strict=True):
            keyed.digests.check_unchanged(
                Path(file)
                for name in work.inputs
                for file in rows[work.sample][name].files
            )
            values = dict(batch.samples[0].values)
            with torch.no_grad():
                pipeline.run(work.steps, values)
            for name in work.wanted:
                writer.add(all_keys[work.sample].addresses[name], values[name])
            progress.update()
        writer.flush()


def _samples(
    setup: Setup, previews: Sequence[PreviewPlan]
) -> tuple[list[Mapping[str, Cell]], list[tuple[int, int]]]:
    """Return the cells and the ids of all samples: those of previews come last, in rows
    of their own.
    """
    rows, sample_ids = setup.dataset.rows, setup.dataset.sample_ids
    behind = len(setup.dataset.table.rows)
    more = [(behind + number, 0) for number, _ in enumerate(previews)]
    return [*rows, *(preview.cells for preview in previews)], [*sample_ids, *more]


def plan_lines(
    setup: Setup,
    rows: Sequence[RowKeys],
    store: FeatureCache,
    presence: Sequence[frozenset[str]],
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the plan file, one per sample; `inputs` and `group` number the
    presence and the signature.
    """
    numbers = {inputs: number for number, inputs in enumerate(presence)}
    groups: dict[Any, int] = {}
    samples = zip(rows, setup.dataset.rows, setup.dataset.sample_ids, strict=True)
    for sample, (keys, cells, (row, chunk)) in enumerate(samples):
        literals = {
            name: serialize(cells[name].literal, {}, name)
            for name in keys.plan.cached_values
            if name not in keys.addresses
        }
        yield {
            "row": row,
            "chunk": chunk,
            "inputs": numbers[keys.plan.inputs],
            "group": groups.setdefault(setup.dataset.signature(sample), len(groups)),
            "values": literals
            | {
                name: {"at": at, "shapes": shapes(store.header(at))}
                for name, at in keys.addresses.items()
            },
        }


def shapes(form: Any) -> Any:
    """Return the shapes of a stored value's tensors, from how it is stored."""
    if "shape" in form:
        return form["shape"]
    return [
        shapes(child)
        for child in form.get("list") or list(form.get("record", {}).values())
    ]
