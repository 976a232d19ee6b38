"""Find the key of every value that stage 1 stores, before anything is decoded."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dstrain.cache.keys import value_keys
from dstrain.cache.store import DIGESTS, FeatureCache
from dstrain.data.cells import Cell, input_key
from dstrain.graph.plan import Plan, Step
from dstrain.models.needed_components import Found, component_digests
from dstrain.runs.reports.preview_plans import PreviewPlan, plan_previews
from dstrain.runs.setup import Setup
from dstrain.storage.hashing import Digests, hash_json


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


def addresses_of(keyed: KeyedSamples) -> Iterator[tuple[int, Collection[str]]]:
    """Yield the row of each sample with the addresses of its values."""
    for sample in keyed.samples:
        yield sample.sample_id[0], sample.addresses.values()
