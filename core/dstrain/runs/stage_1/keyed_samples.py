"""Find the key of every value that stage 1 stores, before anything is decoded."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np

from dstrain.cache import FeatureCache, as_text
from dstrain.cache.addresses import ABSENT, ADDRESS, BYTES, Addresses, Numbers, PlanKeys
from dstrain.cache.backend.index import digests_of_files
from dstrain.console import counted
from dstrain.data import Cell, input_key, inputs_of
from dstrain.data.dataset import Groups, SampleIds
from dstrain.graph import Plan, Step
from dstrain.models.needed_components import Found, component_digests
from dstrain.runs.prompt_rows import PromptPlan, plan_rows
from dstrain.runs.recorded_versions import component_code
from dstrain.runs.setup import Setup
from dstrain.storage import hash_json
from dstrain.storage.columns import BATCH_ROWS
from dstrain.storage.file_digests import Digests, ModelDigests
from dstrain.storage.lazy_sequences import Lazy

NO_ADDRESS = bytes(BYTES)


@dataclass(frozen=True, slots=True)
class KeyedSample:
    """A sample of the dataset, or the inputs of a row that a plugin adds."""

    sample_id: tuple[int, int]
    """Its row and chunk."""
    cells: Mapping[str, Cell]
    plan: Plan
    addresses: Mapping[str, str]
    """Cached value -> its key; inputs that are not files have none."""


@dataclass(frozen=True)
class AddressedSamples(Lazy[KeyedSample]):
    """Samples with the addresses of their values, made when they are used."""

    cells: Sequence[Mapping[str, Cell]]
    """The cells of each sample of the dataset."""
    prompt_rows: Sequence[PromptPlan]
    """They come last, as rows that the table does not have."""
    sample_ids: SampleIds
    plans: Sequence[Plan]
    plan_numbers: Groups
    """The number of each sample's plan."""
    columns: Mapping[str, Addresses]
    """Cached value -> its address in each sample; zeros where a sample has none."""
    names: Sequence[Sequence[str]]
    """The values of each plan that have addresses."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.plan_numbers)

    def one(self, number: int) -> KeyedSample:
        """Return a sample by its number, from 0 on."""
        added = number - len(self.cells)
        cells = self.prompt_rows[added].cells if added >= 0 else self.cells[number]
        return self._sample(number, cells)

    def __iter__(self) -> Iterator[KeyedSample]:
        """Yield the samples in order."""
        added = (row.cells for row in self.prompt_rows)
        return map(self._sample, count(), chain(self.cells, added))

    def missing_from(self, cache: FeatureCache) -> "MissingWork":
        """Return the samples to compute, each value for the first sample that needs it."""
        width = max(len(self.columns), 1)
        places = []
        addresses = []
        for start in range(0, len(self), BATCH_ROWS):
            # Sample by sample, the addresses of all values.
            part = [
                column[start : start + BATCH_ROWS] for column in self.columns.values()
            ]
            if not part:
                break
            of_part = np.stack(part, axis=1).reshape(-1)
            lacking = np.flatnonzero(of_part != np.frombuffer(NO_ADDRESS, ADDRESS))
            lacking = lacking[cache.locate(of_part[lacking]) == ABSENT]
            places.append(start * width + lacking)
            addresses.append(of_part[lacking])
        if not places:
            places, addresses = [np.empty(0, np.int64)], [np.empty(0, ADDRESS)]
        _, first = np.unique(np.concatenate(addresses), return_index=True)
        claimed = np.sort(np.concatenate(places)[first])
        numbers, starts = np.unique(claimed // width, return_index=True)
        return MissingWork(
            self, numbers, np.append(starts, len(claimed)), claimed % width
        )

    def _sample(self, index: int, cells: Mapping[str, Cell]) -> KeyedSample:
        number = self.plan_numbers[index]
        row, chunk = self.sample_ids[index].tolist()
        addresses = {
            name: as_text(self.columns[name][index]) for name in self.names[number]
        }
        return KeyedSample((row, chunk), cells, self.plans[number], addresses)


@dataclass(frozen=True)
class KeyedSamples:
    """All samples with the keys of their values, and what the keys were made from."""

    found: Found
    components: Mapping[str, str]
    """Component -> digest of its files, its configuration and the family's code for it."""
    digests: Digests
    """The digests of the dataset's files."""
    model_digests: ModelDigests
    samples: AddressedSamples
    """The samples of the dataset, then one for each row that plugins add."""

    def addresses(self) -> Iterator[tuple[int, Collection[str]]]:
        """Yield the row of each sample with the addresses of its values."""
        for sample in self.samples:
            yield sample.sample_id[0], sample.addresses.values()


@dataclass(frozen=True)
class Work:
    """The values of a sample that the cache lacks, and what computes them."""

    sample: KeyedSample
    values: Sequence[str]
    steps: Sequence[Step]
    inputs: frozenset[str]
    """The inputs that these steps use."""


def key_rows(setup: Setup) -> KeyedSamples:
    """Find the components, and all keys; read the files that changed since they were read."""
    dataset = setup.dataset
    added = plan_rows(setup)
    plans = [setup.plan(inputs) for inputs in dataset.input_sets]
    found = setup.find([*plans, *(row.plan for row in added)])
    digests = digests_of_files(setup.cache_path)
    model_digests = ModelDigests()
    components = component_keys(setup, found, model_digests)
    samples = _addressed(setup, added, components, digests)
    return KeyedSamples(found, components, digests, model_digests, samples)


def component_keys(setup: Setup, found: Found, digests: Digests) -> dict[str, str]:
    """Return component -> digest of its files, its configuration and the family's code
    for it.
    """
    components = component_digests(found, digests)
    for name in found.files:
        code = dict(component_code(setup.family, name))
        components[name] = hash_json("component", [components[name], code])
    experts = setup.spec.experts
    if experts is not None:
        # Units ask for the configuration by the name of the denoiser.
        for role, own in experts.roles.items():
            for one in own:
                if f"{one}_config" in components:
                    digest = components[f"{one}_config"]
                    components.setdefault(f"{role}_config", digest)
    return components


def _addressed(
    setup: Setup,
    added: Sequence[PromptPlan],
    components: Mapping[str, str],
    digests: Digests,
) -> AddressedSamples:
    """Compute the addresses of the values of all samples."""
    dataset = setup.dataset
    sets = {inputs: number for number, inputs in enumerate(dataset.input_sets)}
    plans = [setup.plan(inputs) for inputs in sets]
    of_signature = np.array([sets[inputs_of(one)] for one in dataset.signatures])
    of_added = np.arange(len(plans), len(plans) + len(added))
    plans += [row.plan for row in added]
    numbers = np.concatenate([of_signature[dataset.groups], of_added])
    keys = [PlanKeys(plan, components, str(setup.dtype)) for plan in plans]
    names: list[list[str]] = [[] for _ in plans]
    columns = {name: bytearray() for plan in plans for name in plan.cached_values}
    samples = chain(dataset.rows, (row.cells for row in added))
    for number, cells in zip(
        numbers.tolist(), counted("hash files", samples, len(numbers)), strict=True
    ):
        plan = plans[number]
        inputs = {name: input_key(cells[name], digests) for name in plan.used_inputs}
        found = keys[number].of(inputs)
        # Inputs that are no file have no address, as in all samples of a plan.
        names[number] = names[number] or [
            name
            for name in plan.cached_values
            if name not in cells or cells[name].files
        ]
        for name, column in columns.items():
            has_it = name in names[number]
            column += bytes.fromhex(found[name]) if has_it else NO_ADDRESS
    rows = len(dataset.table.rows)
    added_ids = [(row, 0) for row in range(rows, rows + len(added))]
    return AddressedSamples(
        dataset.rows,
        added,
        np.concatenate(
            [dataset.sample_ids, np.array(added_ids, np.int64).reshape(-1, 2)]
        ),
        plans,
        numbers.astype(np.int32),
        {name: np.frombuffer(column, ADDRESS) for name, column in columns.items()},
        names,
    )


@dataclass(frozen=True)
class MissingWork(Lazy[Work]):
    """The work of samples whose values the cache lacks, made when it is used."""

    samples: AddressedSamples
    numbers: Numbers
    """The samples with something to compute, in order."""
    starts: Numbers
    """Where the values of each begin; at the end, their number."""
    values: Numbers
    """Which of the columns of addresses each value is in."""

    def __len__(self) -> int:
        """Return the number of samples with something to compute."""
        return len(self.numbers)

    def one(self, number: int) -> Work:
        """Return the work of one sample, by its number, from 0 on."""
        sample = self.samples[int(self.numbers[number])]
        columns = list(self.samples.columns)
        numbers = self.values[self.starts[number] : self.starts[number + 1]]
        missing = {columns[number] for number in numbers.tolist()}
        values = [name for name in sample.addresses if name in missing]
        steps, inputs = _steps(sample.plan, frozenset(values))
        return Work(sample, values, steps, inputs)

    @property
    def components(self) -> frozenset[str]:
        """Return the components that compute these values, for any plan."""
        columns = list(self.samples.columns)
        missing = frozenset(columns[number] for number in np.unique(self.values))
        found: set[str] = set()
        for plan in self.samples.plans:
            steps, _ = _steps(plan, missing)
            found |= plan.components_of(steps)
        return frozenset(found)


def _steps(plan: Plan, values: frozenset[str]) -> tuple[list[Step], frozenset[str]]:
    """Return the steps that compute these values, and the inputs that they use."""
    needed = set(values)
    steps: list[Step] = []
    for step in reversed(plan.cached_steps):
        if needed & set(step.outputs.values()):
            steps.insert(0, step)
            needed |= set(step.inputs.values())
    return steps, frozenset(needed & plan.inputs)
