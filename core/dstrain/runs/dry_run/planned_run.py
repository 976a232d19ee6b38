"""The run as a dry run shows it to plugins: what it would load, train and write, and how
that changes with other options.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn
from torch.utils._pytree import tree_leaves

from dstrain.config import as_size
from dstrain.config.numbers import parse_resolutions
from dstrain.config.options import TrainConfig
from dstrain.distributed import Sharding
from dstrain.errors import DstrainError
from dstrain.graph import Plan
from dstrain.graph.keepers import BEFORE_LORA
from dstrain.models import Config, components_of, empty_component, find
from dstrain.models.placing import set_dtype
from dstrain.pipeline import Pipeline
from dstrain.pipeline.planned_weights import (
    KeptWeights,
    PlannedComponent,
    kept_weights,
    planned_component,
)
from dstrain.pipeline.variant_choice import entries_that_differ
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.outputs import KEPT_STATES
from dstrain.runs.checks.flags import refuse_precision
from dstrain.runs.datasets.flags import most_frames
from dstrain.runs.datasets.sizes import LargestSample
from dstrain.runs.dry_run.planned_rows import PlannedRows
from dstrain.runs.launch.variables import machine_size, world_size
from dstrain.runs.loaded_module import load_module
from dstrain.runs.resolve import of_stage, with_keepers
from dstrain.runs.setup import Setup
from dstrain.training import SKIPPED, Sample, SampleSource, TrainingModule
from dstrain.training.batching import Groups, SampleIds
from dstrain.training.optimizers import SIDE


@dataclass(frozen=True)
class CachedRows:
    """Samples of a feature cache."""

    _source: SampleSource
    _ids: SampleIds
    shapes: Groups
    """Sample -> the number of its shape."""

    def sample(self, index: int) -> Sample:
        """Read a sample."""
        return self._source.sample(*self._ids[index].tolist())


@dataclass(frozen=True)
class PlannedRun:
    """A run of which nothing is loaded."""

    setup: Setup
    """What its options and model files resolve to, which may change with every version."""
    plans: Sequence[Plan]
    """What is computed, one plan for each set of inputs that rows have."""
    _rows: PlannedRows
    steps: int | None
    """Optimizer steps; None if they are not known."""
    steps_per_epoch: int | None
    """The steps of an epoch; None if they are not known."""
    typed: TrainConfig
    """Its options as they were given, where files that they name are not here."""
    components: Mapping[str, PlannedComponent] = field(default_factory=dict)
    """What it loads that has weights, by name; nothing without model files."""
    absent: tuple[str, ...] = ()
    """The components whose files are not on this machine."""
    _built: list[Pipeline | TrainingModule] = field(default_factory=list)
    """What was built to check the model files, until somebody takes it."""

    @classmethod
    def of(
        cls,
        setup: Setup,
        plans: Sequence[Plan],
        rows: PlannedRows,
        length: tuple[int | None, int | None],
        typed: TrainConfig,
        built: Pipeline | TrainingModule | None,
    ) -> "PlannedRun":
        """Measure what was built without memory, which is None without model files."""
        run = cls(setup, plans, rows, *length, typed)
        if built is None:
            return run
        pipeline = built if isinstance(built, Pipeline) else built.pipeline
        lora = () if isinstance(built, Pipeline) else tuple(built.trained.lora)
        found = {
            name: planned_component(name, network, name in lora)
            for name, network in pipeline.components.items()
            if isinstance(network, nn.Module)
        }
        absent = tuple(name for name in found if name not in pipeline.files)
        return replace(run, components=found, absent=absent, _built=[built])

    @property
    def config(self) -> TrainConfig:
        """Return its options."""
        return self.setup.config

    @property
    def stage(self) -> str:
        """Return 'data_process' for stage 1, 'train' for stage 2, '' for both at once."""
        return self.setup.stage

    @property
    def sharding(self) -> Sharding | None:
        """Return how trained networks are sharded among processes, if they are."""
        return self.setup.sharding

    @property
    def processes(self) -> int:
        """Return how many processes networks in training are sharded among."""
        sharding = self.sharding
        if sharding is None:
            return 1
        return sharding.processes(world_size(os.environ), machine_size(os.environ))

    @property
    def rows(self) -> int:
        """Return the rows of the dataset; 0 if they are not known."""
        return self._rows.count

    @property
    def largest(self) -> LargestSample | None:
        """Return the largest sample of the dataset, if it is known."""
        return self._rows.largest

    @property
    def most_frames(self) -> int:
        """Return the frames of the longest clip."""
        return most_frames(self.config)

    @property
    def most_pixels(self) -> int:
        """Return the pixels of an image or frame that --max_pixels or the largest
        --resolution allows.
        """
        sides = parse_resolutions(self.config.resolution)
        return max(sides) ** 2 if sides else self.config.max_pixels

    @property
    def cached(self) -> CachedRows | None:
        """Return the samples that stage 2 trains on; None where they are not cached yet."""
        data = self._rows.data
        if data is None or self.stage != "train":
            return None
        present = data.groups != SKIPPED
        return CachedRows(data.source, data.sample_ids[present], data.groups[present])

    @property
    def resumes(self) -> bool:
        """Return whether a saved state is there to resume."""
        config = self.config
        if config.resume is None or config.output_path is None:
            return False
        return config.resume != "auto" or any(states(config.output_path))

    @property
    def kept_states(self) -> int:
        """Return how many training states stay in the output folder."""
        return self.config.keep_checkpoints or KEPT_STATES

    @property
    def optimizer_bytes(self) -> float:
        """Return the bytes of the optimizer's state per trained number, as seen on a
        matrix.
        """
        leaves = tree_leaves(self.setup.optimizer.trial)
        return round(sum(getattr(one, "nbytes", 0) for one in leaves) / SIDE**2, 2)

    def loaded(self, stage: str) -> tuple[str, ...]:
        """Return the names of the components that a stage loads."""
        names = (name for plan in self.plans for name in plan.components[stage])
        return tuple(dict.fromkeys(names))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the components with weights whose configuration is not known."""
        known = components_of(self.setup.family)
        return tuple(
            name
            for name in self.loaded(self.stage)
            if not known[name].is_folder and name not in self.components
        )

    @cached_property
    def kept(self) -> Mapping[str, KeptWeights]:
        """Return how the weights of each component are kept."""
        return {
            name: kept_weights(one, self.setup.keepers)
            for name, one in self.components.items()
        }

    def of_stage(self, stage: str) -> "PlannedRun":
        """Return one stage of a command that runs both."""
        names = self.loaded(stage)
        return replace(
            self,
            setup=of_stage(self.setup, stage),
            components={n: one for n, one in self.components.items() if n in names},
            absent=tuple(name for name in self.absent if name in names),
        )

    def with_config(
        self, config: TrainConfig, stage: str | None = None
    ) -> "PlannedRun":
        """Return the run with other options of how weights are kept and trained.

        Raises UsageError for those that the run cannot have.

        stage: What to check them for; that of the run without it.
        """
        setup = self.setup
        if config is setup.config:
            return self
        changed = with_keepers(replace(setup, config=config))
        if (setup.stage if stage is None else stage) != "data_process":
            names = ("optimizer", "optimizer_args", "trainable_dtype")
            if all(getattr(config, one) == getattr(setup.config, one) for one in names):
                vars(changed)["optimizer"] = setup.optimizer  # tried once
            refuse_precision(changed)
        return replace(self, setup=changed, _built=[])

    def module(self, whole: bool = False) -> TrainingModule:
        """Return its module without memory, which is the caller's alone.

        whole: Whether it makes the step of a run that is not split.
        """
        setup = self.setup
        if whole and setup.stage == "train":
            config = replace(setup.config, task=setup.config.task_name)
            setup = replace(setup, stage="", config=config)
            return load_module(
                setup, self.plans, setup.find(self.plans), TrainingModule, empty=True
            )
        built = self._built.pop() if self._built else self._build()
        if isinstance(built, TrainingModule):
            return built
        module = TrainingModule(built, setup.task)
        module.trained.components = setup.trainables.components
        return module

    def _build(self) -> Pipeline | TrainingModule:
        setup = self.setup
        found = setup.find(self.plans, [])
        if setup.stage != "data_process":
            return load_module(setup, self.plans, found, TrainingModule, empty=True)
        return Pipeline.from_found(
            setup.family, setup.spec, found, setup.device, setup.dtype, empty=True
        )


def described_with_bytes(setup: Setup, plan: Plan) -> dict[str, str]:
    """Return how components are kept in words, with the bytes that their weights take,
    those that are as they are loaded left out.

    A component of which no configuration is given is measured as it is first published.
    Raises UsageError for layers that the given one does not have.
    """
    found = setup.keepers.described(plan.components[""])
    for name, words in found.items():
        published, config = _config_of(setup, name)
        component = components_of(setup.family)[name]
        network = None if config is None else empty_component(component, config)
        if network is None:
            continue
        if not published:
            setup.keepers.check({name: network}, setup.device, BEFORE_LORA)
        set_dtype(network, setup.dtype)
        size = planned_component(name, network.requires_grad_(False), has_lora=False)
        place = setup.keepers.bytes(name, size.tensors)
        places = {"on the device": place.device, "in RAM": place.ram}
        said = [f"{as_size(one)} {where}" for where, one in places.items() if one]
        words += f": {', '.join(said)}, loaded as {size.dtype}"
        found[name] = words + published
    return found


def _config_of(setup: Setup, name: str) -> tuple[str, Config | None]:
    """Return the configuration that the given model files tell of a component; else, that
    of the first published model that it may be of, after the words that say so.
    """
    spec, family = setup.spec, setup.family
    if setup.models:
        with suppress(DstrainError):
            found = find(family, setup.models, [name], (), spec.components, [])
            if name in found.configs:
                return "", found.configs[name]
    experts = spec.experts
    denoisers = experts.components if experts else (family.default_trainable,)
    wanted = spec.denoiser_config if name in denoisers else {}
    for model, config in components_of(family)[name].published.items():
        if not entries_that_differ(wanted, config):
            return f", if it is as in {model}", config
    return "", None
