"""Split equivalence of random programs: unsplit equals data_process then train, bit for bit,
loss and every gradient.

A program goes through files, the feature cache and the training module as any family
does.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from dstrain.config.options import TrainConfig
from dstrain.distributed.world import ProcessGroup
from dstrain.graph.values import Frames
from dstrain.models.component_files import ModelConfig
from dstrain.models.components import Component, Files
from dstrain.randomness import Rng, SampleKey, seed_global
from dstrain.registry.family import ModelFamily
from dstrain.registry.hooks import load_extensions
from dstrain.runs.build import open_training_data, prepare
from dstrain.runs.precompute import data_process
from dstrain.runs.setup import Setup
from dstrain.training.batching import split_across_ranks
from dstrain.training.collate import collate
from dstrain.training.loader import Batch, Sample
from dstrain.training.module import TrainingModule
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.programs import NETS, OTHERS, TENSORS, Net, Program, plans, program

PROGRAMS = range(2000)
"""Seeds of the programs; what a program is made of is drawn in `tests/support/programs.py`."""
EVERY_TENTH = PROGRAMS[::10]


class InOrder(TrainingModule):
    """No stages at all: the units that the loss needs, one after the other as they are
    written, all with gradient.
    """

    def losses(self, samples: Sequence[Sample], keys: Sequence[SampleKey]) -> Tensor:
        plan, spec = self.plan(samples[0].inputs), self.pipeline.spec
        names = [unit.name for unit in spec.units]
        steps = sorted(
            (*plan.cached_steps, *plan.train_steps),
            key=lambda step: names.index(step.unit.name),
        )
        tables = [dict(sample.values) for sample in samples]
        for table, key in zip(tables, keys, strict=True):
            seed_global(key, "units")
            self.pipeline.run(steps, table, Rng([key]))
        seed_global(keys[0], "step")
        in_step = [{name: table[name] for name in plan.loss_inputs} for table in tables]
        return self._task_losses(collate(in_step, spec.padded), keys)


@dataclass(frozen=True)
class Record(ModelFamily):
    """A family that is not installed anywhere: its components are at hand."""

    parts: tuple[Component, ...] = ()

    def load(self, part: str) -> Any:
        assert part == "components"
        return self.parts


def load_net(files: Files, configuration: Mapping[str, Any], dtype: torch.dtype) -> Net:
    net = Net(configuration["dropout"])
    net.load_state_dict(
        {
            name.partition(".")[2]: weight
            for name, weight in load_file(files.paths[0]).items()
        }
    )
    return net.to(dtype)


RECORD = Record(
    "random", "", "", "", ("base",), "dit", MappingProxyType({}), MappingProxyType({}),
    parts=tuple(Component(net, SimpleNamespace(load=load_net), net, (f"{net}.*",)) for net in NETS),
)  # fmt: skip


def write_program(made: Program, folder: Path) -> Setup:
    """Write the program's networks and dataset; returns a run of it in a single run."""
    torch.manual_seed(0)
    for i, net in enumerate(NETS):
        weights = {
            f"{net}.{name}": weight for name, weight in Net(0).state_dict().items()
        }
        config = json.dumps({"dropout": made.dropouts[net], "shift": 0.1 * i})
        save_file(weights, folder / f"{net}.safetensors", {"config": config})
    for name, size in (("small", (3, 4)), ("wide", (5, 4))):
        # Pillow's own noise depends on how much of it was made before.
        pixels = np.random.default_rng(size).integers(
            0, 256, (size[1], size[0], 3), np.uint8
        )
        Image.fromarray(pixels).save(folder / f"{name}.png")
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(made.rows[0]))
        writer.writeheader()
        writer.writerows(made.rows)
    config = TrainConfig(
        model="random", dataset_base_path=folder, dataset_repeat=3, batch_size=made.batch_size,
        feature_cache=folder / "cache", output_path=folder / "out",
    )  # fmt: skip
    models = tuple(ModelConfig(path=str(folder / f"{net}.safetensors")) for net in NETS)
    return Setup(
        config,
        RECORD,
        made.spec,
        made.task,
        "",
        made.trainables,
        torch.device("cpu"),
        models,
        load_extensions(),
    )


Gradients = dict[str, Tensor | None]


def run(
    setup: Setup, module_class: type[TrainingModule] = TrainingModule
) -> tuple[TrainingModule, Any, list[Any]]:
    """The module, its samples, and the loss and gradients of the first batches, without
    an update between them.
    """
    processes = ProcessGroup(Accelerator(cpu=True))
    samples = open_training_data(setup)
    training_run = prepare(setup, processes, samples, module_class)
    for name, parameter in training_run.module.trained.parameters.items():
        if (
            "lora_B" in name
        ):  # zero at first, and then the gradients of lora_A are zero too
            nn.init.constant_(parameter, 0.3)
    seen = []
    for keys in islice(training_run.order.global_batches(0), 2):
        (micro,) = split_across_ranks(keys, setup.config.batch_size, 0, 1)
        training_run.module.zero_grad(set_to_none=True)
        loss = training_run.module(
            Batch(micro, [samples.source.sample(key.row) for key in keys])
        )
        if loss.requires_grad:
            loss.backward()
        seen.append(
            (
                loss.detach(),
                {
                    name: p.grad
                    for name, p in training_run.module.trained.parameters.items()
                },
            )
        )
    return training_run.module, samples.source, seen


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same bit for bit; None equals None alone."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, Frames) and isinstance(b, Frames):
        return equal(a.pixels, b.pixels) and a.fps == b.fps
    return type(a) is type(b) and bool(a == b)


def check_law(seed: int, folder: Path) -> None:
    setup = write_program(program(seed), folder)
    data_process(
        replace(setup, stage="data_process"), ProcessGroup(Accelerator(cpu=True))
    )
    module, source, unsplit = run(setup)
    assert equal(unsplit, run(replace(setup, stage="train"))[2])
    assert equal(unsplit, run(setup, InOrder)[2])
    check_stages(module, [source.sample(row) for row in range(len(setup.dataset.rows))])


def check_stages(module: TrainingModule, samples: Sequence[Sample]) -> None:
    """Change what is trained and the random numbers: no cached value changes, and
    everything else does.

    A truth value of a train step may be the same both ways for a row; what reads
    nothing else then stays, too.
    """
    before = [staged(module, sample, 0) for sample in samples]
    still = {(i, name) for i, (_, trained) in enumerate(before) for name in trained}
    moved: set[tuple[int, str]] = set()
    torch.manual_seed(
        0
    )  # so that a program's outcome does not depend on which ran before it
    for change in range(1, 100):
        with torch.no_grad():
            for parameter in module.trained_parameters:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for i, sample in enumerate(samples):
            cached, trained = staged(module, sample, change)
            assert equal(cached, before[i][0])
            for name, made in trained.items():
                changed = {
                    (i, key)
                    for key, value in made.items()
                    if not equal(value, before[i][1][name][key])
                }
                moved |= changed
                still -= {(i, name)} if changed else set()
        if not still:
            return
    at_fault = {
        (i, name)
        for i, name in still
        if _is_reached(module, samples[i], name, {k for j, k in moved if j == i})
    }
    assert not at_fault, f"trained, and yet nothing changes them: {at_fault}"


def _is_reached(
    module: TrainingModule, sample: Sample, name: str, moved: set[str]
) -> bool:
    """Whether a train step asks for what was changed, or reads a value that did."""
    (step,) = (
        s
        for s in module.plan(sample.inputs).train_steps
        if f"{s.unit.name} {s.branch}" == name
    )
    return bool(
        {"rng", *module.trained.components} & set(step.unit.components)
        or moved & set(step.inputs.values())
    )


@torch.no_grad()
def staged(
    module: TrainingModule, sample: Sample, repeat: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the cached steps make of a sample, and what the train steps make, by step."""
    plan = module.plan(sample.inputs)
    table = dict(sample.values)
    module.pipeline.run(plan.cached_steps, table)
    cached = dict(table)
    module.pipeline.run(plan.train_steps, table, Rng([SampleKey(0, 0, repeat, 0)]))
    return cached, {
        f"{s.unit.name} {s.branch}": {key: table[key] for key in s.outputs.values()}
        for s in plan.train_steps
    }


@pytest.mark.promise("R10", "the split is right: random programs, unsplit == split")
@pytest.mark.parametrize("seed", PROGRAMS)
def test_unsplit_is_split_and_no_unit_is_in_the_wrong_stage(
    seed: int, tmp_path: Path
) -> None:
    check_law(seed, tmp_path)


def test_programs_cover_what_a_split_may_get_wrong() -> None:
    """The generator is worth its name: each thing that could break equivalence is in many
    of the ordinary suite's 200.
    """
    counts = dict.fromkeys(
        (
            "trained",
            "cached",
            "passed on",
            "both stages",
            "rng",
            "branches",
            "constrain_latents",
            "skipped",
            *TENSORS,
            *OTHERS,
        ),
        0,
    )
    for seed in EVERY_TENTH:
        made = program(seed)
        for plan in plans(made):
            steps = (*plan.cached_steps, *plan.train_steps)
            kinds = set(plan.cached_kinds.values())
            found = {
                "trained": plan.train_steps, "cached": plan.cached_steps,
                "passed on": plan.cached_values,
                "both stages": plan.train_steps and plan.cached_steps,
                "rng": any("rng" in step.unit.components for step in steps),
                "branches": any(step.branch == "negative" for step in steps),
                "constrain_latents": made.spec.constrain_latents,
                "skipped": plan.skipped, **{kind: kind in kinds for kind in (*TENSORS, *OTHERS)},
            }  # fmt: skip
            for name, value in found.items():
                counts[name] += bool(value)
    assert min(counts.values()) >= 10, counts
