"""Say in a table what a run needs in memory and on disk, and with which flags it fits."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

import torch
from dstrain.plugin import PlannedComponent, PlannedRun, Section, commands
from dstrain.plugin.commands import as_size, as_table, fitted, number_of, status

from dstrain_planner.memory.advice import Advice, added_flags, as_commands, continued
from dstrain_planner.memory.counting import count
from dstrain_planner.memory.disk import disk_of
from dstrain_planner.memory.estimate import CAST, CONTEXT, FRAGMENTED, Estimate
from dstrain_planner.memory.planning import MemoryPlan
from dstrain_planner.options import PlannerOptions
from dstrain_planner.sizes import parse_size

COUNTING = "counting what the run needs ..."
SEARCHING = "looking for what makes it fit ..."
"""What a terminal shows meanwhile: of a large model, half a minute in all."""
INDENT = "    "
Row = tuple[str, str, str]
"""What needs memory, how much, and why."""


def sections(run: PlannedRun) -> Iterator[Section]:
    """Yield the tables of memory and disk, and whether the run fits."""
    if run.stage == "generate":
        yield _generation(run)
        return
    if not run.setup.models:
        title = "memory: not known, since no model files are given"
        yield Section(title, is_answer=True)
        return
    with status(COUNTING):
        plan = MemoryPlan(run, count(run))
        stages = [plan]
        if run.config.runs_both_stages:
            stages = [plan.of_stage("data_process"), plan.of_stage("train")]
        needs = [(one, one.estimate(one.run.config, one.run.stage)) for one in stages]
        for one, found in needs:
            yield _memory(one, found)
        for one, _ in needs:
            yield _disk(one)
    with status(SEARCHING):
        yield _verdict(plan, [found for _, found in needs])


def _generation(planned: PlannedRun) -> Section:
    """Return what the weights of `dstrain generate` need."""
    rows = [
        _component(one, planned.kept[name].device, planned.kept[name].words)
        for name, one in planned.components.items()
    ]
    turns = [one.device for one in planned.kept.values() if one.is_offloaded]
    weights = sum(one.device for one in planned.kept.values())
    peak = weights - sum(turns) + max(turns, default=0) + CONTEXT
    note = f"with {as_size(CONTEXT)} for the device's context and libraries"
    rows.append(("peak", f"more than {as_size(peak)}", note))
    title = "memory of one device, without what a step computes"
    return Section(title, _table(rows), {"peak": peak})


def _verdict(plan: MemoryPlan, peaks: Sequence[Estimate]) -> Section:
    """Return whether the run fits, and if not, what makes it fit."""
    title = "whether it fits"
    if len(peaks) > 1:
        larger = max(peaks, key=lambda found: found.peak)
        number = 1 + peaks.index(larger)
        title += (
            f": the larger peak decides, that of stage {number}: {as_size(larger.peak)}"
        )
    lines = [*_fit(plan, peaks)]
    device = device_memory(plan.run)
    fits = None if device is None else [one.fits(device[0]) for one in peaks]
    # None if that is not known of a stage.
    every = fits and (False if False in fits else all(fits) or None)
    data = {"device": device and device[0], "fits": every}
    return Section(title, lines, data, is_answer=True)


def _memory(plan: MemoryPlan, found: Estimate) -> Section:
    """Return what a stage needs at its peak."""
    stage = _stage_name(plan.run.stage)
    title = f"memory of one device at the peak of {stage}, computed from shapes"
    lines = _table(_needed(plan, found))
    if found.activations is not None:
        lines += fitted([f"{INDENT}computed for {plan.counted.origin}"])
    return Section(title, lines, {"stage": stage, **asdict(found), "peak": found.peak})


def _needed(plan: MemoryPlan, found: Estimate) -> Iterator[Row]:
    """Yield what needs memory at the peak of a stage."""
    run = plan.run
    for name in run.loaded(run.stage):
        if name in run.components:
            kept = run.kept[name].words
            yield _component(run.components[name], found.weights[name], kept)
    for name in run.unknown:
        yield name, "not known", "its configuration is not here"
    if run.stage != "data_process":
        yield from _training(run, found)
        if run.sharding is not None:
            note = f"whole while they compute; all else is divided by {run.processes}"
            yield "weights put together", as_size(found.together), note
    yield _activations(plan, found)
    context = f"{as_size(CONTEXT)} for the device's context and libraries"
    note = f"{context}, {FRAGMENTED:.0%} for fragmentation"
    yield "not counted", as_size(found.margin), note
    total = as_size(found.peak)
    yield "peak", total if found.activations is not None else f"more than {total}", ""
    if found.ram:
        offloads = run.sharding is not None and run.sharding.offload
        what = "RAM for what is sharded" if offloads else "RAM for weights"
        yield what, as_size(found.ram), ""


def _stage_name(stage: str) -> str:
    return {"": "the run", "data_process": "stage 1", "train": "stage 2"}[stage]


def _table(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table, sizes below each other."""
    found = [*rows]
    width = max(len(size) for _, size, _ in found)
    first, *others = [(what, size.rjust(width), note) for what, size, note in found]
    table = as_table(first, others, commands.PAGE_WIDTH - len(INDENT))
    return [f"{INDENT}{line}" for line in table.splitlines()]


def _component(size: PlannedComponent, stored: int, kept: str) -> Row:
    how = f"{size.dtype}; {kept}" if kept else size.dtype
    return size.name, as_size(stored), f"{_count(size.parameters)} in {how}"


def _count(numbers: int) -> str:
    """Write a number of parameters: '20.43 B', '1.3 M', '512'."""
    for unit, value in (("B", 10**9), ("M", 10**6)):
        if numbers >= value / 10:
            return f"{numbers / value:.2f} {unit} parameters"
    return f"{numbers:,} parameters"


def _training(run: PlannedRun, found: Estimate) -> Iterator[Row]:
    numbers = sum(one.trained for one in run.components.values())
    dtype = "bf16" if run.setup.optimizer.rounds else "fp32"
    note = f"{_count(numbers)} in {dtype}"
    yield "trained weights", as_size(found.trained), note
    yield "gradients", as_size(found.gradients), dtype
    note = f"{run.setup.optimizer.name}, {run.optimizer_bytes:g} bytes per trained parameter"
    yield "optimizer state", as_size(found.optimizer), note
    if found.average:
        yield "average (EMA)", as_size(found.average), "fp32"


def _activations(plan: MemoryPlan, found: Estimate) -> Row:
    if found.activations is None:
        return "activations", "not known", plan.counted.origin
    config = plan.run.config
    how = "without checkpointing"
    if config.use_gradient_checkpointing_offload:
        how = "with checkpointing and offloading"
    elif plan.run.setup.checkpoints:
        how = "with checkpointing"
    what = "activations"
    if plan.run.stage == "data_process":
        what, how = "encoding", "one sample at a time"
    note = f"batch {config.batch_size}, {how}"
    return what, as_size(found.activations), note


def device_memory(run: PlannedRun) -> tuple[int, str] | None:
    """Return the bytes of the device to plan for, and its name: that of
    --device_memory, else of the GPU that is here; None without either.
    """
    text = run.config.of(PlannerOptions).device_memory
    if text is not None:
        return parse_size("--device_memory", text), f"--device_memory {text}"
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.total_memory, str(properties.name)


def _fit(plan: MemoryPlan, stages: Sequence[Estimate]) -> Iterator[str]:
    """Yield whether all stages fit on the device, and what makes them fit."""
    device = device_memory(plan.run)
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
        yield from _advice(plan, size)


def _advice(plan: MemoryPlan, size: int) -> Iterator[str]:
    """Yield the commands with which it fits."""
    run = plan.run
    way = plan.cheapest(size)
    if way is None:
        yield "    no flags are known with which it fits"
        own = run.config.of(PlannerOptions)
        if own.recipe:
            # What a recipe quantizes stays as it is, but one for less memory may quantize more.
            card = f" --card {own.device_memory}" if own.device_memory else ""
            yield f"    recipes that may: dstrain recipes --model {run.config.model}{card}"
        if run.sharding is not None:
            advice = run.sharding.advice()
            yield from fitted(f"        {line}" for line in advice)
        return
    if run.sharding is not None:
        # The launcher and its file are not among the flags of a command.
        added = [way.stage_1, way.changes] if way.is_split else [way.changes]
        commands = [
            Advice(f"add {added_flags(one)}, behind the same launcher", False)
            for one in added
        ]
    else:
        commands = as_commands(run.typed, way)
    if run.config.runs_both_stages:
        first, second = map(_needs, plan.estimate_stages(way))
        yield "    it fits with this command:"
        yield f"    stage 1, with {first}"
        yield f"    stage 2, with {second}"
        yield from _shown(commands[0])
        return
    if not way.is_split:
        found = plan.estimate(way.config, run.stage)
        yield f"    it fits, with {_needs(found)}:"
        yield from _shown(commands[0])
        if run.stage == "data_process" and way.shared:
            shared = added_flags(way.shared)
            yield f"    stage 2 needs {shared}, too: cached values depend on it"
        return
    yield "    it fits in two stages:"
    for number, found in enumerate(plan.estimate_stages(way), 1):
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


def _disk(plan: MemoryPlan) -> Section:
    """Return what a stage writes to the disk, and fetches."""
    run = plan.run
    title = f"disk, {_stage_name(run.stage)}" if run.setup.is_one_of_both else "disk"
    found = [*_written(plan)]
    lines = _table(found) if found else [f"{INDENT}not known"]
    return Section(title, lines, {"needs": found})


def _written(plan: MemoryPlan) -> Iterator[Row]:
    """Yield what a stage writes to the disk."""
    run = plan.run
    fetched = CAST * sum(run.components[name].parameters for name in run.absent)
    if fetched:
        yield "downloads", as_size(fetched), "about, in bf16; twice that in fp32"
    if run.stage == "data_process":
        counted = plan.counted.activations
        if counted is not None:
            yield from _cache(counted.sample, run.rows, fetched)
        return
    trained = [one for one in run.components.values() if one.trained]
    if not trained:
        yield "weights files", "not known", ""
        return
    # What is saved of sharded networks is whole.
    whole = replace(run, setup=replace(run.setup, sharding=None))
    found = replace(plan, run=whole).estimate(run.config, run.stage)
    weights = sum(map(_saved_bytes, trained))
    saves_what = ""
    if run.config.ema_decay is not None:
        # A file beside each save, in the precision of the weights.
        weights *= 2
        saves_what = ", each with its average (EMA)"
    state = found.trained + found.optimizer + found.average
    disk = disk_of(run, weights, state, fetched)
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


def _saved_bytes(component: PlannedComponent) -> int:
    """Return the bytes of a weights file of a trained component."""
    if component.has_lora:
        return component.trained_bytes
    return sum(one.size for one in component.tensors if one.is_parameter)


def _cache(sample: int, rows: int, fetched: int) -> Iterator[Row]:
    """Yield what stage 1 writes, if it stores so many bytes of the largest sample."""
    if not rows:
        yield "feature cache, per sample", as_size(sample), ""
        return
    note = f"at most, {as_size(sample)} for the largest sample"
    yield "feature cache", as_size(sample * rows), note
    yield "in all", as_size(sample * rows + fetched), "at most"
