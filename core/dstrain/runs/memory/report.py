"""Say in a table what a run needs in memory and on disk, and with which flags it fits."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch

from dstrain.config.options.train import TrainConfig
from dstrain.config.sizes import as_size, parse_size
from dstrain.graph.plan import Plan
from dstrain.models.components import components_of
from dstrain.models.execution.kept import AS_LOADED
from dstrain.pipeline.kept_choice import kept_components
from dstrain.runs.launch.variables import machine_size, world_size
from dstrain.runs.memory.advice import Possible, Way, as_commands, cheapest
from dstrain.runs.memory.components import ComponentSize
from dstrain.runs.memory.disk import disk_of
from dstrain.runs.memory.estimate import (
    CAST,
    RESERVE,
    Choice,
    Estimate,
    estimate,
    state_bytes,
)
from dstrain.runs.memory.facts import Facts
from dstrain.runs.offload import with_offload
from dstrain.runs.setup import Setup

WIDTH = 30


def report(
    setup: Setup,
    plans: Sequence[Plan],
    facts: Facts,
    steps: int | None,
    per_epoch: int | None,
    rows: int,
) -> Iterator[str]:
    """Yield the lines of the table.

    Args:
        setup: The run.
        plans: Its plans.
        facts: What it loads and trains.
        steps: Its optimizer steps, if they are known.
        per_epoch: Those of an epoch, if they are known.
        rows: Rows of the dataset; 0 if they are not known.
    """
    stage = setup.stage
    found = estimate_way(setup, plans, facts, Way(setup.config, {}), stage)
    yield ""
    yield f"memory of one device at the peak of {_stage_name(stage)}, computed from shapes"
    for name in _names(plans, stage):
        if name in facts.components:
            kept = setup.kept.get(name, AS_LOADED).describe()
            size = facts.components[name]
            yield _line(*_component(size, found.weights[name], kept))
    for name in facts.unknown:
        yield _line(name, "not known", "its configuration is not here")
    if stage != "data_process":
        yield from _training(setup, facts, found)
        if setup.sharding is not None:
            note = (
                f"whole while they compute; all else is divided by {_processes(setup)}"
            )
            yield _line("weights put together", as_size(found.together), note)
    yield from _activations(setup, facts, found)
    total = as_size(found.least + RESERVE)
    words = total if found.activations is not None else f"more than {total}"
    yield _line("peak", words, f"with {as_size(RESERVE)} for the device itself")
    if found.ram:
        offloads = setup.sharding is not None and setup.sharding.offload
        what = "RAM for what is divided" if offloads else "RAM for weights"
        yield _line(what, as_size(found.ram))
    yield from _fit(setup, plans, facts, found)
    yield from _disk(setup, plans, facts, found, steps, per_epoch, rows)


def _stage_name(stage: str) -> str:
    return {"": "the run", "data_process": "stage 1", "train": "stage 2"}[stage]


def _line(what: str, size: str, note: str = "") -> str:
    return f"    {what:<{WIDTH}} {size:>12}  {note}".rstrip()


def _names(plans: Sequence[Plan], stage: str) -> tuple[str, ...]:
    """Return the components that a stage loads."""
    return tuple(
        dict.fromkeys(name for plan in plans for name in plan.components[stage])
    )


def _component(size: ComponentSize, stored: int, kept: str) -> tuple[str, str, str]:
    how = f"{size.dtype}; {kept}" if kept else size.dtype
    return size.name, as_size(stored), f"{_count(size.parameters)} in {how}"


def _count(numbers: int) -> str:
    """Write a number of parameters: '20.43 B', '1.3 M', '512'."""
    for unit, value in (("B", 10**9), ("M", 10**6)):
        if numbers >= value / 10:
            return f"{numbers / value:.2f} {unit} parameters"
    return f"{numbers} parameters"


def _training(setup: Setup, facts: Facts, found: Estimate) -> Iterator[str]:
    numbers = sum(one.trained for one in facts.components.values())
    yield _line("trained weights", as_size(found.trained), f"{_count(numbers)} in fp32")
    yield _line("gradients", as_size(found.gradients), "fp32")
    optimizer = setup.optimizer
    per_number = state_bytes(optimizer.trial)
    note = f"{optimizer.name}, {per_number:g} bytes per trained parameter"
    yield _line("optimizer state", as_size(found.optimizer), note)
    if found.average:
        yield _line("average (EMA)", as_size(found.average), "fp32")


def _activations(setup: Setup, facts: Facts, found: Estimate) -> Iterator[str]:
    if found.activations is None:
        yield _line("activations", "not known", facts.origin)
        return
    config = setup.config
    how = "without checkpointing"
    if config.use_gradient_checkpointing_offload:
        how = "with checkpointing and offloading"
    elif config.checkpoints:
        how = "with checkpointing"
    what = "activations"
    if setup.stage == "data_process":
        what, how = "encoding", "one sample at a time"
    note = f"{facts.origin}, batch {config.batch_size}, {how}"
    yield _line(what, as_size(found.activations), note)


def estimate_way(
    setup: Setup, plans: Sequence[Plan], facts: Facts, way: Way, stage: str
) -> Estimate:
    """Estimate a stage of the run with the flags of a way."""
    changed = with_flags(setup, way.config)
    choice = Choice(
        way.config,
        changed.kept,
        state_bytes(changed.optimizer.trial) if stage != "data_process" else 0.0,
        changed.mixed_precision == "bf16",
        setup.sharding,
        _processes(setup),
    )
    return estimate(facts, _names(plans, stage), choice, stage)


def _processes(setup: Setup) -> int:
    """Return how many processes networks in training are divided among."""
    if setup.sharding is None:
        return 1
    return setup.sharding.processes(world_size(os.environ), machine_size(os.environ))


def with_flags(setup: Setup, config: TrainConfig) -> Setup:
    """Return the setup of other flags about memory."""
    if config is setup.config:
        return setup
    kept = kept_components(
        config, setup.family, setup.spec, setup.models, lambda: setup.extensions
    )
    changed = replace(setup, config=config, kept=kept)
    if config.optimizer == setup.config.optimizer:
        vars(changed)["optimizer"] = setup.optimizer  # tried once
    return with_offload(changed)


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


def _fit(
    setup: Setup, plans: Sequence[Plan], facts: Facts, found: Estimate
) -> Iterator[str]:
    """Yield whether it fits on the device, and what makes it fit."""
    device = device_memory(setup)
    if device is None:
        yield "    no GPU is here; --device_memory 24GB says whether it fits on one"
        return
    size, name = device
    fits = found.fits(size)
    where = f"{name} ({as_size(size)})"
    if fits is None:
        yield f"    whether it fits on {where} is not known"
        return
    if fits:
        yield f"    it fits on {where}"
        return
    yield f"    it does not fit on {where}"
    if found.activations is None:
        return
    if setup.stage == "data_process":
        return
    possible = possible_ways(setup, plans, facts)

    def fits_with(way: Way) -> bool | None:
        stages = ("data_process", "train") if way.is_split else (setup.stage,)
        every = [
            estimate_way(setup, plans, facts, way, one).fits(size) for one in stages
        ]
        return all(every)

    way = cheapest(setup.config, possible, fits_with)
    if way is None:
        yield "    no flags are known with which it fits"
        if setup.sharding is not None:
            yield from (f"        {line}" for line in setup.sharding.advice())
        return
    stage = "train" if way.is_split else setup.stage
    peak = estimate_way(setup, plans, facts, way, stage).least + RESERVE
    yield f"    it fits, with a peak of {as_size(peak)}:"
    yield from (f"        {command}" for command in as_commands(setup.config, way))


def possible_ways(setup: Setup, plans: Sequence[Plan], facts: Facts) -> Possible:
    """Return what the run could do to need less."""
    loaded = set(_names(plans, ""))
    divides = setup.sharding is not None
    lora: tuple[str, ...] = ()
    if not setup.trainables.full:
        lora = tuple(one.component for one in setup.trainables.lora)
    parts = [one for name in lora for one in facts.components[name].stored]
    known = components_of(setup.family)
    return Possible(
        precision=setup.mixed_precision,
        can_split=loaded != set(_names(plans, "train")),
        # What sharding refuses is not advised.
        blocks=0 if divides else 1 + max((one.block for one in parts), default=-1),
        lora=lora,
        modulation={name: known[name].modulation for name in lora},
        has_bitsandbytes=find_spec("bitsandbytes") is not None,
        can_choose_optimizer=not divides,
    )


def _disk(
    setup: Setup,
    plans: Sequence[Plan],
    facts: Facts,
    found: Estimate,
    steps: int | None,
    per_epoch: int | None,
    rows: int,
) -> Iterator[str]:
    config = setup.config
    yield ""
    yield "disk"
    fetched = CAST * sum(facts.components[name].parameters for name in facts.absent)
    if fetched:
        note = "about, if they are published in bf16"
        yield _line("downloads", as_size(fetched), note)
    if setup.stage == "data_process":
        if facts.activations is not None:
            yield from _cache(facts.activations.sample, rows, fetched)
        return
    trained = [one for one in facts.components.values() if one.trained]
    if not trained:
        yield "    not known"
        return
    weights = sum(one.saved_bytes for one in trained)
    if setup.sharding is not None:
        # What is saved is whole.
        alone = replace(setup, sharding=None)
        found = estimate_way(alone, plans, facts, Way(config, {}), setup.stage)
    saves_what = ""
    if config.ema_decay is not None:
        # A file beside each save, in the precision of the weights.
        weights *= 2
        saves_what = ", each with its average (EMA)"
    state = found.trained + found.optimizer + found.average
    disk = disk_of(config, weights, state, steps, per_epoch, fetched)
    saves = "unknown" if disk.saves is None else str(disk.saves)
    yield _line("weights files", as_size(disk.weights), f"x {saves} saves{saves_what}")
    note = f"x {disk.states}, one of them while it is written"
    yield _line("training states", as_size(disk.state), note)
    if disk.most is not None:
        yield _line("in all", as_size(disk.most), "at most")


def _cache(sample: int, rows: int, fetched: int) -> Iterator[str]:
    """Yield what stage 1 writes, if it stores so many bytes of the largest sample."""
    if not rows:
        yield _line("feature cache, per sample", as_size(sample))
        return
    note = f"at most, {as_size(sample)} for the largest sample"
    yield _line("feature cache", as_size(sample * rows), note)
    yield _line("in all", as_size(sample * rows + fetched), "at most")


def planned(setup: Setup) -> Setup:
    """Return the setup as on a GPU, if --device_memory plans for one: there, frozen
    weights are in bf16 by default.
    """
    if setup.config.device_memory is None:
        return setup
    return replace(setup, device=torch.device("cuda"))
