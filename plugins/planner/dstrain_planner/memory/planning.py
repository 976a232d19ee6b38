"""Plan a run: estimate it with other flags, and find the cheapest with which it fits."""

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from typing import Any

from dstrain.plugin import PlannedComponent, PlannedRun, TrainConfig, UsageError
from dstrain.plugin.commands import flags_by_name, silenced

from dstrain_planner.memory.activations import Activations
from dstrain_planner.memory.advice import (
    Possible,
    Way,
    encoding_ways,
    first_stage,
    ways,
)
from dstrain_planner.memory.counting import Counted, encoding_in_tiles
from dstrain_planner.memory.estimate import Estimate, estimate


@dataclass(frozen=True)
class MemoryPlan:
    """A run, and the activations that were counted of it."""

    run: PlannedRun
    counted: Counted

    def of_stage(self, stage: str) -> "MemoryPlan":
        """Return one stage of a command that runs both."""
        return replace(self, run=self.run.of_stage(stage))

    def estimate(self, config: TrainConfig, stage: str) -> Estimate:
        """Estimate a stage with other flags about memory.

        Raises UsageError for flags that the run cannot have.
        """
        counted = self.counted.activations
        if "tiled" in config.plugin_options.keys() - self.run.config.plugin_options:
            counted = self._in_tiles
        return self._estimate(counted, config, stage)

    def _estimate(
        self, counted: Activations | None, config: TrainConfig, stage: str
    ) -> Estimate:
        return estimate(self.run.with_config(config, stage), counted, stage)

    @cached_property
    def _in_tiles(self) -> Activations | None:
        """Return the activations of the run with VAEs that compute in tiles."""
        counted = self.counted.activations
        encoding = encoding_in_tiles(self.run)
        if counted is None or encoding is None:
            return None
        return replace(counted, encoding=encoding)

    def cheapest(self, size: int) -> Way | None:
        """Return the cheapest way with which the run fits on a device of this size, a
        run that loads encoders beside the denoiser perhaps in two stages, a command of
        both with what each of them needs; None if none is known.
        """
        config = self.run.config
        with silenced():
            if self.run.stage == "data_process":
                way = Way(config)
                if self.possible.precision == "no":
                    way = way.with_changes(mixed_precision="bf16")
                return self._cheapest_encoding(way, size)
            encodings: dict[str | None, Way | None] = {}
            # Of a command that runs both stages, the first may be all that does not fit.
            as_given = [Way(config)] if config.runs_both_stages else []
            for way in chain(as_given, ways(config, self.possible)):
                has_stages = way.is_split or config.runs_both_stages
                stage = "train" if has_stages else self.run.stage
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
        config = replace(self.run.config, **way.stage_1)
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
            if self._estimate(None, config, stage).fits(size) is False:
                # Before anything is counted again: there is no room for weights alone.
                return False
            return bool(self.estimate(config, stage).fits(size))
        except UsageError:
            return False

    @cached_property
    def possible(self) -> Possible:
        """Return what the run could do to need less."""
        run = self.run
        setup = run.setup
        sizes = run.components
        trained = () if setup.trainables.full else setup.trainables.lora
        lora = tuple(one.component for one in trained if one.component in sizes)
        encoders = [sizes[name] for name in run.loaded("data_process") if name in sizes]
        encoders.sort(key=lambda size: size.frozen_bytes, reverse=True)
        known = {one.name: one for one in setup.family.load("components")}
        blocks = max((sizes[name].blocks for name in lora), default=0)
        if "quant_options" not in flags_by_name(TrainConfig):
            # The plugin that keeps weights otherwise is not installed.
            lora, encoders, blocks = (), [], 0
        return Possible(
            precision=setup.mixed_precision,
            can_split={*run.loaded("")} != {*run.loaded("train")},
            # What sharding refuses is not advised.
            blocks=0 if run.sharding else blocks,
            lora=tuple(name for name in lora if not run.kept[name].is_stored),
            modulation={name: known[name].modulation for name in lora},
            encoders=tuple(
                size.name
                for size in encoders
                if _is_mostly_linear(size) and not run.kept[size.name].is_stored
            ),
            taking_turns=tuple(size.name for size in encoders),
            has_tiles="tiled" not in run.config.plugin_options
            and self._accepts(tiled=True),
            has_bitsandbytes=find_spec("bitsandbytes") is not None,
            can_choose_optimizer=run.sharding is None,
            accepts=self._has_optimizer,
            resumes=run.resumes,
        )

    def _accepts(self, **changes: Any) -> bool:
        """Return whether the run could have these options, as far as stage 1 tells."""
        try:
            self.run.with_config(replace(self.run.config, **changes), "data_process")
        except (UsageError, TypeError):  # of an option that is not installed
            return False
        return True

    def _has_optimizer(self, config: TrainConfig) -> bool:
        try:
            _ = self.run.with_config(config, "train").setup.optimizer
        except (UsageError, TypeError):  # of an option that is not installed
            return False
        return True


def _is_mostly_linear(component: PlannedComponent) -> bool:
    """Return whether most of its bytes are weights that a method could store."""
    linear = sum(one.size for one in component.tensors if one.is_linear)
    return 2 * linear > component.frozen_bytes
