"""Say in a table what a run needs in memory and on disk, and with which flags it fits."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from dstrain.config import as_size
from dstrain.config.serialize import continued
from dstrain.config.sizes import parse_size
from dstrain.console import PAGE_WIDTH, as_table, fitted, number_of
from dstrain.models.execution import AS_LOADED
from dstrain.runs.memory.advice import Advice, added_flags, as_commands
from dstrain.runs.memory.components import ComponentSize
from dstrain.runs.memory.disk import disk_of
from dstrain.runs.memory.estimate import (
    CAST,
    CONTEXT,
    FRAGMENTED,
    Estimate,
    state_bytes,
)
from dstrain.runs.memory.facts import Facts
from dstrain.runs.memory.planning import PlannedRun
from dstrain.runs.setup import Setup

INDENT = "    "
Row = tuple[str, str, str]
"""What needs memory, how much, and why."""


def report(
    run: PlannedRun, steps: int | None, per_epoch: int | None, rows: int
) -> Iterator[str]:
    """Yield the lines of the tables of memory and disk.

    Args:
        run: The run.
        steps: Its optimizer steps, if they are known.
        per_epoch: Those of an epoch, if they are known.
        rows: Rows of the dataset; 0 if they are not known.
    """
    needs = _needs_of(run)
    for one, found in needs:
        yield from _memory(one, found)
    for one, _ in needs:
        yield from _disk(one, steps, per_epoch, rows)


def verdict(run: PlannedRun) -> Iterator[str]:
    """Yield whether the run fits, and if not, what makes it fit: what a reader looks for,
    so it comes last, where it is on the screen.
    """
    peaks = [found for _, found in _needs_of(run)]
    yield ""
    if len(peaks) == 1:
        yield "whether it fits"
    else:
        larger = max(peaks, key=lambda found: found.peak)
        number = 1 + peaks.index(larger)
        yield f"whether it fits: the larger peak decides, that of stage {number}: {as_size(larger.peak)}"
    yield from _fit(run, peaks)


def _needs_of(run: PlannedRun) -> list[tuple[PlannedRun, Estimate]]:
    """Return the stages of a command, or the run that is not split, with their peaks."""
    stages = [run]
    if run.setup.config.runs_both_stages:
        stages = [run.of_stage("data_process"), run.of_stage("train")]
    return [(one, one.estimate(one.setup.config, one.setup.stage)) for one in stages]


def _memory(run: PlannedRun, found: Estimate) -> Iterator[str]:
    """Yield what a stage needs at its peak."""
    facts = run.facts
    stage = _stage_name(run.setup.stage)
    yield ""
    yield f"memory of one device at the peak of {stage}, computed from shapes"
    yield from _table(_needed(run, found))
    if found.activations is not None:
        yield from fitted([f"{INDENT}computed for {facts.origin}"])


def _needed(run: PlannedRun, found: Estimate) -> Iterator[Row]:
    """Yield what needs memory at the peak of a stage."""
    setup, facts = run.setup, run.facts
    for name in run.components(setup.stage):
        if name in facts.components:
            kept = setup.kept.get(name, AS_LOADED).describe()
            size = facts.components[name]
            yield _component(size, found.weights[name], kept)
    for name in facts.unknown:
        yield name, "not known", "its configuration is not here"
    if setup.stage != "data_process":
        yield from _training(setup, facts, found)
        if setup.sharding is not None:
            note = f"whole while they compute; all else is divided by {run.processes}"
            yield "weights put together", as_size(found.together), note
    yield _activations(setup, facts, found)
    context = f"{as_size(CONTEXT)} for the device's context and libraries"
    note = f"{context}, {FRAGMENTED:.0%} for fragmentation"
    yield "not counted", as_size(found.margin), note
    total = as_size(found.peak)
    yield "peak", total if found.activations is not None else f"more than {total}", ""
    if found.ram:
        offloads = setup.sharding is not None and setup.sharding.offload
        what = "RAM for what is sharded" if offloads else "RAM for weights"
        yield what, as_size(found.ram), ""


def _stage_name(stage: str) -> str:
    return {"": "the run", "data_process": "stage 1", "train": "stage 2"}[stage]


def _table(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table, sizes below each other."""
    found = [*rows]
    width = max(len(size) for _, size, _ in found)
    first, *others = [(what, size.rjust(width), note) for what, size, note in found]
    table = as_table(first, others, PAGE_WIDTH - len(INDENT))
    return [f"{INDENT}{line}" for line in table.splitlines()]


def _component(size: ComponentSize, stored: int, kept: str) -> Row:
    how = f"{size.dtype}; {kept}" if kept else size.dtype
    return size.name, as_size(stored), f"{_count(size.parameters)} in {how}"


def _count(numbers: int) -> str:
    """Write a number of parameters: '20.43 B', '1.3 M', '512'."""
    for unit, value in (("B", 10**9), ("M", 10**6)):
        if numbers >= value / 10:
            return f"{numbers / value:.2f} {unit} parameters"
    return f"{numbers:,} parameters"


def _training(setup: Setup, facts: Facts, found: Estimate) -> Iterator[Row]:
    numbers = sum(one.trained for one in facts.components.values())
    optimizer = setup.optimizer
    dtype = "bf16" if optimizer.rounds else "fp32"
    note = f"{_count(numbers)} in {dtype}"
    yield "trained weights", as_size(found.trained), note
    yield "gradients", as_size(found.gradients), dtype
    per_number = state_bytes(optimizer.trial)
    note = f"{optimizer.name}, {per_number:g} bytes per trained parameter"
    yield "optimizer state", as_size(found.optimizer), note
    if found.average:
        yield "average (EMA)", as_size(found.average), "fp32"


def _activations(setup: Setup, facts: Facts, found: Estimate) -> Row:
    if found.activations is None:
        return "activations", "not known", facts.origin
    config = setup.config
    how = "without checkpointing"
    if config.use_gradient_checkpointing_offload:
        how = "with checkpointing and offloading"
    elif config.checkpoints:
        how = "with checkpointing"
    what = "activations"
    if setup.stage == "data_process":
        what, how = "encoding", "one sample at a time"
    note = f"batch {config.batch_size}, {how}"
    return what, as_size(found.activations), note


def device_memory(setup: Setup) -> tuple[int, str] | None:
    """Return the bytes of the device to plan for, and its name: that of
    --device_memory, else of the GPU that is here; None without either.
    """
    text = setup.config.device_memory
    if text is not None:
        return parse_size("--device_memory", text), f"--device_memory {text}"
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.total_memory, str(properties.name)


def _fit(run: PlannedRun, stages: Sequence[Estimate]) -> Iterator[str]:
    """Yield whether all stages fit on the device, and what makes them fit."""
    device = device_memory(run.setup)
    if device is None:
        yield "    no GPU is here; --device_memory 24GB says whether it fits on one"
        return
    size, name = device
    fits = [found.fits(size) for found in stages]
    where = f"{name} ({as_size(size)})"
    if all(fits):
        yield f"    it fits on {where}"
        return
    if False not in fits:
        yield f"    whether it fits on {where} is not known"
        return
    yield f"    it does not fit on {where}"
    if all(found.activations is not None for found in stages):
        yield from _advice(run, size)


def _advice(run: PlannedRun, size: int) -> Iterator[str]:
    """Yield the commands with which it fits."""
    way = run.cheapest(size)
    if way is None:
        yield "    no flags are known with which it fits"
        config = run.setup.config
        if config.recipe:
            # What a recipe quantizes stays as it is, but one for less memory may quantize more.
            card = f" --card {config.device_memory}" if config.device_memory else ""
            yield f"    recipes that may: dstrain recipes --model {config.model}{card}"
        if run.setup.sharding is not None:
            advice = run.setup.sharding.advice()
            yield from fitted(f"        {line}" for line in advice)
        return
    if run.setup.sharding is not None:
        # The launcher and its file are not among the flags of a command.
        added = [way.stage_1, way.changes] if way.is_split else [way.changes]
        commands = [
            Advice(f"add {added_flags(one)}, behind the same launcher", False)
            for one in added
        ]
    else:
        commands = as_commands(run.typed or run.setup.config, way)
    if run.setup.config.runs_both_stages:
        first, second = map(_needs, run.estimate_stages(way))
        yield "    it fits with this command:"
        yield f"    stage 1, with {first}"
        yield f"    stage 2, with {second}"
        yield from _shown(commands[0])
        return
    if not way.is_split:
        found = run.estimate(way.config, run.setup.stage)
        yield f"    it fits, with {_needs(found)}:"
        yield from _shown(commands[0])
        if run.setup.stage == "data_process" and way.shared:
            shared = added_flags(way.shared)
            yield f"    stage 2 needs {shared}, too: cached values depend on it"
        return
    yield "    it fits in two stages:"
    for number, found in enumerate(run.estimate_stages(way), 1):
        yield f"    stage {number}, with {_needs(found)}:"
        yield from _shown(commands[number - 1])


def _shown(command: Advice) -> list[str]:
    """Return the lines of a command, or of what to add to one."""
    indent = 2 * INDENT
    if command.is_whole:
        return continued(command.text, indent)
    return fitted([indent + command.text])


def _needs(found: Estimate) -> str:
    words = f"a peak of {as_size(found.peak)}"
    return f"{words} and {as_size(found.ram)} of weights in RAM" if found.ram else words


def _disk(
    run: PlannedRun, steps: int | None, per_epoch: int | None, rows: int
) -> Iterator[str]:
    setup = run.setup
    yield ""
    yield f"disk, {_stage_name(setup.stage)}" if setup.is_one_of_both else "disk"
    found = [*_written(run, steps, per_epoch, rows)]
    yield from _table(found) if found else [f"{INDENT}not known"]


def _written(
    run: PlannedRun, steps: int | None, per_epoch: int | None, rows: int
) -> Iterator[Row]:
    """Yield what a stage writes to the disk."""
    setup, facts = run.setup, run.facts
    config = setup.config
    fetched = CAST * sum(facts.components[name].parameters for name in facts.absent)
    if fetched:
        note = "about, if they are published in bf16"
        yield "downloads", as_size(fetched), note
    if setup.stage == "data_process":
        if facts.activations is not None:
            yield from _cache(facts.activations.sample, rows, fetched)
        return
    trained = [one for one in facts.components.values() if one.trained]
    if not trained:
        yield "weights files", "not known", ""
        return
    # What is saved of sharded networks is whole.
    whole = replace(run, setup=replace(setup, sharding=None))
    found = whole.estimate(config, setup.stage)
    weights = sum(one.saved_bytes for one in trained)
    saves_what = ""
    if config.ema_decay is not None:
        # A file beside each save, in the precision of the weights.
        weights *= 2
        saves_what = ", each with its average (EMA)"
    state = found.trained + found.optimizer + found.average
    disk = disk_of(config, weights, state, steps, per_epoch, fetched)
    saves = "unknown" if disk.saves is None else str(disk.saves)
    yield (
        "weights files",
        as_size(disk.weights),
        f"x {number_of(saves, 'save')}{saves_what}",
    )
    note = f"x {disk.states}, one of them while it is written"
    yield "training states", as_size(disk.state), note
    if disk.most is not None:
        yield "in all", as_size(disk.most), "at most"


def _cache(sample: int, rows: int, fetched: int) -> Iterator[Row]:
    """Yield what stage 1 writes, if it stores so many bytes of the largest sample."""
    if not rows:
        yield "feature cache, per sample", as_size(sample), ""
        return
    note = f"at most, {as_size(sample)} for the largest sample"
    yield "feature cache", as_size(sample * rows), note
    yield "in all", as_size(sample * rows + fetched), "at most"
