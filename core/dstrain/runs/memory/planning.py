"""Plan a run: estimate it with other flags, and find the cheapest with which it fits."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import chain

from dstrain.config.options import TrainConfig
from dstrain.console import silenced
from dstrain.errors import UsageError
from dstrain.graph import Plan
from dstrain.models import components_of
from dstrain.models.execution import AS_LOADED
from dstrain.pipeline import kept_components
from dstrain.pipeline.tile_choice import can_tile
from dstrain.runs.checkpoints.state_folders import states
from dstrain.runs.checks.flags import refuse_precision
from dstrain.runs.launch.variables import machine_size, world_size
from dstrain.runs.memory.advice import Possible, Way, encoding_ways, first_stage, ways
from dstrain.runs.memory.estimate import Choice, Estimate, estimate, state_bytes
from dstrain.runs.memory.facts import Facts, encoding_in_tiles
from dstrain.runs.memory.samples import LargestSample
from dstrain.runs.offload import blocks_to_swap, check_offloaded
from dstrain.runs.resolve import of_stage
from dstrain.runs.setup import Setup


@dataclass(frozen=True)
class PlannedRun:
    """A run of which nothing is loaded."""

    setup: Setup
    plans: Sequence[Plan]
    facts: Facts
    largest: LargestSample | None = None
    """The largest sample of its dataset, if it is known."""
    typed: TrainConfig | None = None
    """Its flags as they were given, where files that they name are not here."""

    def of_stage(self, stage: str) -> "PlannedRun":
        """Return one stage of a command that runs both."""
        facts = self.facts.of_components(self.components(stage))
        return replace(self, setup=of_stage(self.setup, stage), facts=facts)

    def components(self, stage: str) -> tuple[str, ...]:
        """Return the components that a stage loads."""
        names = (name for plan in self.plans for name in plan.components[stage])
        return tuple(dict.fromkeys(names))

    def estimate(self, config: TrainConfig, stage: str) -> Estimate:
        """Estimate a stage with other flags about memory.

        Raises UsageError for flags that the run cannot have.
        """
        facts = self.facts
        if config.tiled and not self.setup.config.tiled:
            facts = self._in_tiles
        return self._estimate(facts, config, stage)

    def _estimate(self, facts: Facts, config: TrainConfig, stage: str) -> Estimate:
        changed = with_flags(self.setup, config, stage)
        trains = stage != "data_process"
        choice = Choice(
            config=config,
            kept=changed.kept,
            state_bytes=state_bytes(changed.optimizer.trial) if trains else 0.0,
            mixed=changed.mixed_precision == "bf16",
            rounds=trains and changed.optimizer.rounds,
            sharding=self.setup.sharding,
            processes=self.processes,
        )
        return estimate(facts, self.components(stage), choice, stage)

    @property
    def processes(self) -> int:
        """Return how many processes networks in training are sharded among."""
        sharding = self.setup.sharding
        if sharding is None:
            return 1
        return sharding.processes(world_size(os.environ), machine_size(os.environ))

    @cached_property
    def _in_tiles(self) -> Facts:
        """Return the facts of the run with VAEs that compute in tiles."""
        counted = self.facts.activations
        encoding = encoding_in_tiles(self.setup, self.plans, self.largest)
        if counted is None or encoding is None:
            return replace(self.facts, activations=None)
        return replace(self.facts, activations=replace(counted, encoding=encoding))

    def cheapest(self, size: int) -> Way | None:
        """Return the cheapest way with which the run fits on a device of this size, a
        run that loads encoders beside the denoiser perhaps in two stages, a command of
        both with what each of them needs; None if none is known.
        """
        config = self.setup.config
        with silenced():
            if self.setup.stage == "data_process":
                way = Way(config)
                if self.possible.precision == "no":
                    way = way.with_changes(mixed_precision="bf16")
                return self._cheapest_encoding(way, size)
            encodings: dict[str | None, Way | None] = {}
            # Of a command that runs both stages, the first may be all that does not fit.
            as_given = [Way(config)] if config.runs_both_stages else []
            for way in chain(as_given, ways(config, self.possible)):
                has_stages = way.is_split or config.runs_both_stages
                stage = "train" if has_stages else self.setup.stage
                if not self._fits(way.config, stage, size):
                    continue
                if not has_stages:
                    return way
                precision = way.config.mixed_precision
                if precision not in encodings:
                    first = first_stage(config, way)
                    encodings[precision] = self._cheapest_encoding(first, size)
                encoding = encodings[precision]
                if encoding is not None:
                    return way.with_first_stage(encoding)
        return None

    def estimate_stages(self, way: Way) -> list[Estimate]:
        """Estimate both stages of a way that has two."""
        config = replace(self.setup.config, **way.stage_1)
        return [
            self.estimate(config, "data_process"),
            self.estimate(way.config, "train"),
        ]

    def _cheapest_encoding(self, way: Way, size: int) -> Way | None:
        """Return the cheapest way of stage 1 from this one on with which it fits."""
        for one in encoding_ways(way, self.possible):
            if self._fits(one.config, "data_process", size):
                return one
        return None

    def _fits(self, config: TrainConfig, stage: str, size: int) -> bool:
        """Return whether it is known that a stage fits; flags that the run cannot have
        are no way to make it.
        """
        try:
            if self._estimate(self._weights, config, stage).fits(size) is False:
                # Before anything is counted again: there is no room for weights alone.
                return False
            return bool(self.estimate(config, stage).fits(size))
        except UsageError:
            return False

    @cached_property
    def _weights(self) -> Facts:
        """Return the facts without activations."""
        return replace(self.facts, activations=None)

    @cached_property
    def possible(self) -> Possible:
        """Return what the run could do to need less."""
        setup = self.setup
        trainables = setup.trainables
        known = components_of(setup.family)
        lora: tuple[str, ...] = ()
        if not trainables.full:
            lora = tuple(one.component for one in trainables.lora)
        sizes = self.facts.components
        lora = tuple(name for name in lora if name in sizes)
        blocks = [one.block for name in lora for one in sizes[name].stored]
        encoders = [
            sizes[name] for name in self.components("data_process") if name in sizes
        ]
        encoders.sort(key=lambda size: size.frozen_bytes, reverse=True)
        return Possible(
            precision=setup.mixed_precision,
            can_split={*self.components("")} != {*self.components("train")},
            # What sharding refuses is not advised.
            blocks=0 if setup.sharding else 1 + max(blocks, default=-1),
            lora=tuple(name for name in lora if self._is_as_loaded(name)),
            modulation={name: known[name].modulation for name in lora},
            encoders=tuple(
                size.name
                for size in encoders
                if size.is_mostly_linear and self._is_as_loaded(size.name)
            ),
            taking_turns=tuple(size.name for size in encoders),
            has_tiles=not setup.config.tiled and can_tile(setup.family, setup.spec),
            has_bitsandbytes=find_spec("bitsandbytes") is not None,
            can_choose_optimizer=setup.sharding is None,
            resumes=_resumes(setup),
        )

    def _is_as_loaded(self, name: str) -> bool:
        return not self.setup.kept.get(name, AS_LOADED).methods


def _resumes(setup: Setup) -> bool:
    """Return whether a saved state is there to resume."""
    config = setup.config
    if config.resume is None or config.output_path is None:
        return False
    return config.resume != "auto" or any(states(config.output_path))


def with_flags(setup: Setup, config: TrainConfig, stage: str) -> Setup:
    """Return the setup of other flags about memory.

    Raises UsageError for those that the run cannot have.
    """
    if config is setup.config:
        return setup
    kept = kept_components(
        config,
        setup.family,
        setup.spec,
        setup.models,
        lambda: setup.extensions,
        blocks_to_swap(config, setup.trainables),
    )
    changed = replace(setup, config=config, kept=kept)
    if stage != "data_process":
        same = ("optimizer", "optimizer_args", "trainable_dtype")
        if all(getattr(config, name) == getattr(setup.config, name) for name in same):
            vars(changed)["optimizer"] = setup.optimizer  # tried once
        refuse_precision(changed)
    check_offloaded(changed)
    return changed
