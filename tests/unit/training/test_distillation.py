"""Whole runs that distill, directly or along trajectories, from what `dstrain generate`
made.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import DIRECT_DISTILL, SFT, TRAJECTORY_IMITATION, TrainConfig, run
from dstrain.graph import make_plan
from dstrain.runs.resolve import resolve

from tests.support.distilling import distillable
from tests.support.family import with_two_experts
from tests.support.runs import config, log, outcome, same, training_run
from tests.support.training_batches import (
    assert_batch_equals_its_samples,
    batch,
    gradients,
)

pytestmark = pytest.mark.usefixtures("tiny")
BOTH = pytest.mark.parametrize("task", ["direct_distill", "trajectory_imitation"])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distillable(tmp_path_factory.mktemp("project"))


def distill(folder: Path, task: str, **changes: Any) -> TrainConfig:
    return config(folder, task=task, dataset_base_path=folder / "made", **changes)


@BOTH
def test_a_batch_has_the_losses_and_gradients_of_its_samples(
    task: str, here: Path
) -> None:
    """Rows 0 and 1 differ in seed and in the length of their texts."""
    ready = training_run(distill(here, task, trainable_models="dit"))
    assert_batch_equals_its_samples(ready, (0, 1))


@BOTH
def test_rows_of_one_batch_have_one_number_of_steps(
    task: str, here: Path, tmp_path: Path
) -> None:
    dataset = resolve(distill(here, task)).dataset
    groups = [dataset.signature(row) for row in range(6)]
    assert groups == [groups[0], groups[0], groups[2]] * 2
    assert groups[0] != groups[2]
    run(distill(here, task, batch_size=6, output_path=tmp_path))
    assert [row["epoch"] for row in log(tmp_path)] == [0] * 2


@BOTH
@pytest.mark.parametrize("trained", [None, "dit", "text_encoder"])
def test_two_stages_train_as_one_bit_for_bit(
    trained: str | None, task: str, here: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"batch_size": 2, "num_epochs": 2}
    flags["trainable_models"] = trained
    run(distill(here, task, output_path=tmp_path / "one", **flags))
    flags |= {"feature_cache": tmp_path / "cache", "output_path": tmp_path / "two"}
    for stage in ("data_process", "train"):
        run(distill(here, f"{task}:{stage}", **flags))
    assert same(outcome(tmp_path / "one"), outcome(tmp_path / "two"))


@BOTH
@pytest.mark.parametrize(
    "flag", ["use_gradient_checkpointing", "use_gradient_checkpointing_offload"]
)
def test_checkpointing_across_steps_changes_no_gradient_by_a_bit(
    flag: str, task: str, here: Path
) -> None:
    plain, checked = (
        training_run(distill(here, task, trainable_models="dit", **flags))
        for flags in ({}, {flag: True})
    )
    for ready in (plain, checked):
        for block in ready.module.pipeline.components["dit"].blocks:
            block.dropout.p = 0.3
    rows = batch(plain, (0, 1))
    assert torch.equal(plain.module(rows), checked.module(rows))
    assert same(gradients(plain.module, [rows]), gradients(checked.module, [rows]))


@BOTH
def test_a_student_comes_nearer_to_what_its_teacher_made_in_many_steps(
    task: str, tmp_path: Path
) -> None:
    """In one command, from a guided teacher, and all weights."""
    teacher = {"num_inference_steps": 12, "guidance_scale": 2.0}
    distillable(tmp_path, (2,) * 6, **teacher)
    flags: dict[str, Any] = {"trainable_models": "dit", "learning_rate": 1e-2}
    flags |= {"feature_cache": tmp_path / "cache", "batch_size": 6, "num_epochs": 60}
    run(distill(tmp_path, task, **flags))
    losses = [numbers["loss"] for numbers in log(tmp_path / "out")]
    assert losses[-1] < losses[0] / 2


def test_a_task_that_runs_the_sampler_uses_every_part_of_a_denoiser() -> None:
    columns = {"prompt", "input_image", "seed", "trajectory", "num_inference_steps"}
    for task, used in (
        (SFT, ("dit2",)),
        (DIRECT_DISTILL, ("dit", "dit2")),
        (TRAJECTORY_IMITATION, ("dit", "dit2")),
    ):
        plan = make_plan(with_two_experts(), frozenset(columns), task, ("dit2",))
        assert plan.components["train"] == used
