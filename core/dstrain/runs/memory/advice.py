"""Find the cheapest flags with which a run fits on a device."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.config.fields import flags
from dstrain.config.options.train import TrainConfig
from dstrain.config.serialize import command_line
from dstrain.config.validation import validate
from dstrain.errors import UsageError

PLANNED = MappingProxyType({"dry_run": False, "device_memory": None})
"""The options of a dry run, for a command that is to be run."""


@dataclass(frozen=True)
class Way:
    """Flags to add to a command, all that cost less included."""

    config: TrainConfig
    changes: dict[str, Any]

    def with_changes(self, **changes: Any) -> "Way":
        """Return the way with more flags."""
        return Way(replace(self.config, **changes), {**self.changes, **changes})

    @property
    def is_split(self) -> bool:
        """Return whether it makes two stages of a run that is not split."""
        return "task" in self.changes


@dataclass(frozen=True)
class Possible:
    """What a run could do."""

    precision: str
    """'bf16' or 'no', as the run is."""
    can_split: bool
    """Whether two stages load less than one run."""
    blocks: int = 0
    """Blocks of its largest network with LoRA, which can be swapped; 0 for none."""
    lora: tuple[str, ...] = ()
    """Components with LoRA, whose frozen weights can be stored in fewer bytes; () if
    others are trained in full."""
    modulation: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component -> patterns of its layers that scale others."""
    has_bitsandbytes: bool = False
    can_choose_optimizer: bool = True
    """Whether another optimizer may be advised."""


def ways(config: TrainConfig, possible: Possible) -> Iterator[Way]:
    """Yield flags that need less memory, each way with those before it, in the order of
    what they cost in time or exactness.
    """
    way = Way(config, {})
    if not config.checkpoints:
        way = way.with_changes(use_gradient_checkpointing=True)
        yield way
    if possible.can_split and not config.stage:
        way = way.with_changes(
            task=f"{config.task_name}:train", feature_cache=_cache_of(config)
        )
        yield way
    if possible.precision == "no":
        way = way.with_changes(mixed_precision="bf16")
        yield way
    if config.batch_size > 1:
        steps = config.gradient_accumulation_steps * config.batch_size
        way = way.with_changes(batch_size=1, gradient_accumulation_steps=steps)
        yield way
    for smaller in _with_fewer_bytes(way, possible):
        yield smaller
        way = smaller
    can_quantize_state = possible.has_bitsandbytes and possible.can_choose_optimizer
    if can_quantize_state and config.optimizer == "adamw":
        way = way.with_changes(optimizer="adamw8bit")
        yield way


def _with_fewer_bytes(way: Way, possible: Possible) -> Iterator[Way]:
    """Yield ways to keep frozen weights: in 8 bits, then inputs of blocks in RAM, then
    up to half of the blocks swapped, then in 4 bits, then more and more blocks swapped.
    """
    config = way.config
    is_free = not (config.fp8_models or config.quant_options)
    blocks = 0 if config.swaps_blocks else possible.blocks
    if possible.lora and is_free:
        way = way.with_changes(quant_options=_options(possible.lora, "int8_block"))
        yield way
    if not config.use_gradient_checkpointing_offload:
        way = way.with_changes(
            use_gradient_checkpointing=False, use_gradient_checkpointing_offload=True
        )
        yield way
    for count in range(1, blocks // 2 + 1):
        yield way.with_changes(blocks_to_swap=count)
    if possible.lora and is_free and possible.has_bitsandbytes:
        four_bits = ";".join(
            _in_4_bits(name, possible.modulation.get(name, ()))
            for name in possible.lora
        )
        way = way.with_changes(quant_options=four_bits)
        yield way
    for count in range(1, blocks + 1):
        way = way.with_changes(blocks_to_swap=count)
        yield way


def _options(components: tuple[str, ...], method: str) -> str:
    return ";".join(f"{name}:{method}" for name in components)


def _in_4_bits(component: str, modulation: Sequence[str]) -> str:
    """Store a component in 4 bits, but layers that scale others in 8."""
    method = "bitsandbytes_nf4"
    if not modulation:
        return f"{component}:{method}"
    layers = ",".join(modulation)
    return f"{component}:{method}/{layers};{component}:int8_block@{layers}"


def cheapest(
    config: TrainConfig, possible: Possible, fits: Callable[[Way], bool | None]
) -> Way | None:
    """Return the first way with which a run fits; None if there is none."""
    for way in ways(config, possible):
        if fits(way):
            return way
    return None


def as_commands(config: TrainConfig, way: Way) -> list[str]:
    """Return the commands of a way as they are typed; the flags alone for a command that
    is not complete yet.
    """
    changes = {**PLANNED, **way.changes}
    try:
        validate(replace(config, **changes))
    except UsageError:
        return [f"add {added_flags(way)}"]
    second = command_line(config, **changes)
    if not way.is_split:
        return [second]
    first = {
        "task": f"{config.task_name}:data_process",
        "feature_cache": way.changes["feature_cache"],
    }
    return [command_line(config, **PLANNED, **first), second]


def added_flags(way: Way) -> str:
    """Return the flags of a way as they are typed."""
    words = []
    defaults = {flag.name: flag.default for flag in flags(TrainConfig)}
    for name, value in way.changes.items():
        if value == defaults[name] or value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return shlex.join(words)


def _cache_of(config: TrainConfig) -> Path:
    """Return a folder for the feature cache of a run."""
    if config.feature_cache is not None:
        return config.feature_cache
    output = config.output_path or Path("output")
    return output.with_name(f"{output.name}-features")
