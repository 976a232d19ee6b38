"""Split equivalence of random programs: unsplit equals data_process then train, bit for bit,
loss and every gradient.

A program goes through files, the feature cache and the training module as any family
does.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from dstrain import Rng, Sample, SampleKey, TrainingModule
from dstrain.distributed import ProcessGroup
from dstrain.randomness import seed_global
from dstrain.runs import data_process
from dstrain.training.collate import collate
from torch import Tensor

from tests.support.program_runs import equal, run, write_program
from tests.support.programs import OTHERS, TENSORS, plans, program

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
