"""List the flags with which a run needs less memory, the cheapest first."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.plugin import TrainConfig, UsageError, commands, shell_word
from dstrain.plugin.commands import command_line, shell_command, validate

READS_ON = os.name != "nt"
"""Whether a shell here reads on after a backslash at the end of a line."""
PLANNED = MappingProxyType({"dry_run": False, "device_memory": None})
"""The options of a dry run, for a command that is to be run."""
FOUR_BITS = "bitsandbytes_nf4"
CACHED = ("mixed_precision", "quant_options", "tiled")
"""Options that cached values depend on, and that both stages have."""


@dataclass(frozen=True)
class Way:
    """Flags to add to a command, all that cost less included."""

    config: TrainConfig
    changes: Mapping[str, Any] = field(default_factory=dict)
    stage_1: Mapping[str, Any] = field(default_factory=dict)
    """The flags to add to the first of two stages."""

    def with_changes(self, **changes: Any) -> "Way":
        """Return the way with more flags."""
        config = replace(self.config, **changes)
        return replace(self, config=config, changes={**self.changes, **changes})

    @property
    def is_split(self) -> bool:
        """Return whether it makes two stages of a run that is not split."""
        return "task" in self.changes

    @property
    def shared(self) -> dict[str, Any]:
        """Return the flags that cached values depend on."""
        return {name: self.changes[name] for name in CACHED if name in self.changes}

    def with_first_stage(self, first: "Way") -> "Way":
        """Return the way of both stages: what cached values depend on is in both, and one
        command for both has the flags of both.
        """
        changes = first.shared
        if self.config.runs_both_stages:
            changes = {
                name: one for name, one in first.changes.items() if name != "task"
            }
        if "quant_options" in changes:
            own = self.config.plugin_options.get("quant_options")
            changes["quant_options"] = _joined(changes["quant_options"], own)
        return replace(self.with_changes(**changes), stage_1=first.changes)


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
    """Components with LoRA, whose frozen weights can be quantized."""
    modulation: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component -> patterns of its layers that scale others."""
    encoders: tuple[str, ...] = ()
    """Components of stage 1 whose weights can be stored in fewer bytes, the largest
    first."""
    taking_turns: tuple[str, ...] = ()
    """Components of stage 1 that can be on the device one at a time."""
    has_tiles: bool = False
    """Whether a component of stage 1 can compute in tiles."""
    has_bitsandbytes: bool = False
    can_choose_optimizer: bool = True
    """Whether another optimizer, and weights in bf16, may be advised."""
    accepts: Callable[[TrainConfig], bool] = lambda config: True
    """Tells whether a run can have such an optimizer."""
    resumes: bool = False
    """Whether it resumes, so that nothing may change that its numbers depend on."""


def ways(config: TrainConfig, possible: Possible) -> Iterator[Way]:
    """Yield flags with which training needs less memory, each way with those before it,
    in the order of what they cost in time or exactness.
    """
    way = Way(config)
    if not (config.checkpoints or _swaps_blocks(config)):
        way = way.with_changes(use_gradient_checkpointing=True)
        yield way
    if possible.resumes:
        yield from _in_other_places(way, possible)
        return
    if possible.can_split and not config.stage and not config.runs_both_stages:
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
    if not possible.can_choose_optimizer:
        return
    is_default = config.optimizer == "adamw" and config.customized_optimizer is None
    if possible.has_bitsandbytes and is_default:
        way = _with_optimizer(way, "adamw8bit", possible)
        yield way
    if config.trainable_dtype == "fp32":
        yield way.with_changes(trainable_dtype="bf16")


def first_stage(config: TrainConfig, way: Way) -> Way:
    """Return the way of stage 1 where a way has two stages."""
    shared = ("feature_cache", "mixed_precision")
    changes = {name: way.changes[name] for name in shared if name in way.changes}
    task = f"{config.task_name}:data_process"
    return Way(config).with_changes(**changes, task=task)


def encoding_ways(way: Way, possible: Possible) -> Iterator[Way]:
    """Yield ways of stage 1 that need less memory, the given one first.

    Every method to store weights is tried with what is exact or nearly so: one component
    at a time on the device, then tiles.
    """
    config = way.config
    takes_turns = (
        len(possible.taking_turns) > 1 and "offload_models" not in config.plugin_options
    )
    names = ",".join(possible.taking_turns)
    if possible.resumes:
        # Other cached values would be another dataset to the run.
        yield way
        if takes_turns:
            yield way.with_changes(offload_models=names)
        return
    for options in _stored_encoders(config, possible):
        stored = way.with_changes(quant_options=options) if options else way
        for tiled in (False, True) if possible.has_tiles else (False,):
            cut = stored.with_changes(tiled=True) if tiled else stored
            yield cut
            if takes_turns:
                yield cut.with_changes(offload_models=names)


def _swaps_blocks(config: TrainConfig) -> bool:
    return not {"blocks_to_swap", "enable_model_cpu_offload"}.isdisjoint(
        config.plugin_options
    )


def _stored_encoders(config: TrainConfig, possible: Possible) -> Iterator[str]:
    """Yield '', then --quant_options that store the largest encoder, and more of them, in
    8 bits, and then in 4.
    """
    yield ""
    methods = ("int8_block", *((FOUR_BITS,) if possible.has_bitsandbytes else ()))
    for method in methods:
        for count in range(1, len(possible.encoders) + 1):
            options = _options(possible.encoders[:count], method)
            yield _joined(config.plugin_options.get("quant_options"), options)


def _with_fewer_bytes(way: Way, possible: Possible) -> Iterator[Way]:
    """Yield ways to keep frozen weights: in 8 bits, then inputs of blocks in RAM, then
    up to half of the blocks swapped, then in 4 bits, then more and more blocks swapped.
    """
    config = way.config
    blocks = 0 if _swaps_blocks(config) else possible.blocks
    given = config.plugin_options.get("quant_options")
    if possible.lora:
        options = _options(possible.lora, "int8_block")
        way = way.with_changes(quant_options=_joined(given, options))
        yield way
    if not config.use_gradient_checkpointing_offload:
        way = _with_inputs_in_ram(way)
        yield way
    for count in range(1, blocks // 2 + 1):
        yield way.with_changes(blocks_to_swap=count)
    if possible.lora and possible.has_bitsandbytes:
        four_bits = [
            _in_4_bits(name, possible.modulation.get(name, ()))
            for name in possible.lora
        ]
        way = way.with_changes(quant_options=_joined(given, *four_bits))
        yield way
    for count in range(1, blocks + 1):
        way = way.with_changes(blocks_to_swap=count)
        yield way


def _in_other_places(way: Way, possible: Possible) -> Iterator[Way]:
    """Yield ways that move to RAM what is on the device, and change no number."""
    if not way.config.use_gradient_checkpointing_offload:
        way = _with_inputs_in_ram(way)
        yield way
    for count in range(1, 1 + (0 if _swaps_blocks(way.config) else possible.blocks)):
        yield way.with_changes(blocks_to_swap=count)


def _with_inputs_in_ram(way: Way) -> Way:
    return way.with_changes(
        use_gradient_checkpointing=None, use_gradient_checkpointing_offload=True
    )


def _joined(*options: str | None) -> str:
    """Join --quant_options, the same entry once."""
    entries = ";".join(filter(None, options)).split(";")
    return ";".join(dict.fromkeys(entries))


def _options(components: Sequence[str], method: str) -> str:
    return ";".join(f"{name}:{method}" for name in components)


def _in_4_bits(component: str, modulation: Sequence[str]) -> str:
    """Quantize a component to 4 bits, but layers that scale others in 8."""
    if not modulation:
        return f"{component}:{FOUR_BITS}"
    layers = ",".join(modulation)
    return f"{component}:{FOUR_BITS}/{layers};{component}:int8_block@{layers}"


def _with_optimizer(way: Way, name: str, possible: Possible) -> Way:
    """Return the way with another optimizer and those of --optimizer_args that it takes."""
    way = way.with_changes(optimizer=name)
    given = way.config.optimizer_args
    taken = tuple(
        one
        for one in given
        if possible.accepts(replace(way.config, optimizer_args=(one,)))
    )
    return way if taken == given else way.with_changes(optimizer_args=taken)


@dataclass(frozen=True)
class Advice:
    """A command to type."""

    text: str
    is_whole: bool
    """Whether it is the command itself; otherwise it says what to add to the one typed."""


def as_commands(config: TrainConfig, way: Way) -> list[Advice]:
    """Return the commands of a way as they are typed; the flags alone for a command that
    is not complete yet.
    """
    added = [way.stage_1, way.changes] if way.is_split else [way.changes]
    stages: list[dict[str, Any]] = [{**PLANNED, **changes} for changes in added]
    try:
        for changes in stages:
            validate(replace(config, **changes))
    except UsageError:
        return [Advice(_in_words(changes), False) for changes in added]
    return [Advice(command_line(config, **changes), True) for changes in stages]


def _in_words(changes: Mapping[str, Any]) -> str:
    """Say how a command that was typed is to be changed."""
    words = f"add {added_flags(changes)}"
    gone = [f"--{name}" for name, value in changes.items() if value == ()]
    return f"{words}, without {', '.join(gone)}" if gone else words


def added_flags(changes: Mapping[str, Any]) -> str:
    """Return the flags that make these changes as they are typed; with values that are
    the defaults, too, since the command may have others.
    """
    words = []
    for name, value in changes.items():
        if name in PLANNED or value is None or value is False:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words.append(f"--{name}")
            if one is not True:
                words.append(str(one))
    return shell_command(words)


def continued(command: str, indent: str) -> list[str]:
    """Return the lines of a command on a page, each but the last with the sign that
    makes a shell read on. It is broken before options alone; on Windows it is one line.
    """
    if not READS_ON:
        return [indent + command]
    parts: list[str] = []
    for word in shlex.split(command):
        quoted = shell_word(word)
        if parts and not word.startswith("-"):
            parts[-1] += f" {quoted}"
        else:
            parts.append(quoted)
    lines = [indent + parts[0]]
    for part in parts[1:]:
        if len(f"{lines[-1]} {part} \\") <= commands.PAGE_WIDTH:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"{indent}    {part}")
    return lines


def _cache_of(config: TrainConfig) -> Path:
    """Return a folder for the feature cache of a run."""
    if config.feature_cache is not None:
        return config.feature_cache
    output = config.output_path or Path("output")
    if output.name in ("", ".."):  # neither has a name to begin with
        output = Path(os.path.abspath(output))
    return output.with_name(f"{output.name}-features")
