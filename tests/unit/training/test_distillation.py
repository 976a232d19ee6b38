"""Whole runs that distill, directly or along trajectories, from what a pipeline made."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Sample, SampleKey, TrainConfig, UsageError, run
from dstrain.runs.resolve import resolve
from torch import Tensor

from tests.support.distilling import distillable
from tests.support.runs import config, log, outcome, same, training_run
from tests.support.training_batches import (
    assert_batch_equals_its_samples,
    batch,
    gradients,
)

pytestmark = pytest.mark.usefixtures("tiny")
DIRECT, ALONG = "direct_distill", "trajectory_imitation"
BOTH = pytest.mark.parametrize("task", [DIRECT, ALONG])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distillable(tmp_path_factory.mktemp("project"))


@pytest.fixture
def copy(here: Path, tmp_path: Path) -> Path:
    """The same project, to change."""
    shutil.copytree(here, tmp_path / "copy")
    return tmp_path / "copy"


def distill(folder: Path, task: str, **changes: Any) -> TrainConfig:
    given = {"dataset_base_path": folder / "made", **changes}
    return config(folder, task=task, **given)


@BOTH
def test_a_batch_has_the_losses_and_gradients_of_its_samples(
    task: str, here: Path
) -> None:
    """Rows 0 and 1 differ in seed and in the length of their texts."""
    ready = training_run(distill(here, task, trainable_models="dit"))
    assert_batch_equals_its_samples(ready, (0, 1))


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
    distillable(tmp_path, (2,) * 6, times=6, scale=2.0)
    flags: dict[str, Any] = {"trainable_models": "dit", "learning_rate": 1e-2}
    flags |= {"feature_cache": tmp_path / "cache", "batch_size": 6, "num_epochs": 60}
    run(distill(tmp_path, task, **flags))
    losses = [numbers["loss"] for numbers in log(tmp_path / "out")]
    assert losses[-1] < losses[0] / 2


@BOTH
def test_images_of_a_trajectory_are_not_encoded(task: str, here: Path) -> None:
    setup = resolve(distill(here, task))
    plan = setup.plan(setup.dataset.input_sets[0])
    values = {"num_inference_steps", "prompt_emb", "prompt_mask"}
    values |= {"trajectory"} if task == ALONG else {"seed", "input_latents"}
    assert set(plan.cached_values) == values
    assert ("vae" in plan.components[""]) == (task == DIRECT)


def test_what_the_pipeline_itself_draws_from_a_seed_costs_nothing(here: Path) -> None:
    """The loss runs the sampler of inference from the same noise."""
    ready = training_run(distill(here, DIRECT))
    module, pipe = ready.module.eval(), ready.module.pipeline
    made: list[Tensor] = []
    given = {"seed": 1, "num_inference_steps": 3, "height": 16, "width": 16}
    pipe(prompt="dog", on_step=lambda i, x: made.append(x), **given)
    sample = ready.data.source.sample(1)
    dog = Sample({**sample.values, "prompt": "dog"}, sample.inputs)
    values = module.preprocess(dog, module.plan(sample.inputs))
    values |= {"num_inference_steps": 3, "input_latents": made[-1]}
    module.stage = "train"
    with torch.no_grad():
        losses = module.losses([Sample(values, sample.inputs)], [SampleKey(0, 0, 0, 1)])
    assert losses.tolist() == [0]


def put(folder: Path, **columns: Any) -> None:
    """Give every row of what was made these cells."""
    table = folder / "made/metadata.json"
    rows = [{**row, **columns} for row in json.loads(table.read_text())]
    table.write_text(json.dumps(rows))


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("cfg_scale", 4, "1 .*got 4"),
        ("cfg_scale", 0.5, "1 .*got 0.5"),
        ("num_inference_steps", 0, "1 .*got 0"),
        ("seed", -1, "0 .*got -1"),
        ("rand_device", "mps", "'mps'"),
    ],
)
def test_rows_that_cannot_be_distilled_are_all_named_before_anything_is_loaded(
    column: str, value: Any, said: str, copy: Path
) -> None:
    put(copy, **{column: value})
    absent = {"model_paths": '["absent.safetensors"]', "variant": "base"}
    with pytest.raises(UsageError) as caught:
        run(distill(copy, DIRECT, **absent))
    for row, line in enumerate(caught.value.help_lines, 1):
        assert re.match(rf"metadata\.json:{row}:{column}: .*{said}", line)
    assert len(caught.value.help_lines) == 6


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("timestep_sampling", "uniform"),
        ("loss_weighting", "none"),
        ("min_timestep_boundary", 0.5),
        ("max_timestep_boundary", 0.5),
        ("timestep_shift", 2.0),
        ("loss", "mae"),
        ("noise_offset", 0.1),
    ],
)
def test_options_that_do_nothing_are_refused(flag: str, value: Any, here: Path) -> None:
    with pytest.raises(UsageError, match=f"--{flag}: .*direct_distill"):
        resolve(distill(here, DIRECT, **{flag: value}))
    resolve(config(here, **{flag: value}))


def test_what_a_run_records_of_its_objective_is_taken_again(here: Path) -> None:
    setup = resolve(distill(here, DIRECT))
    again = resolve(setup.recorded)
    assert again.recorded == setup.recorded
    assert again.recorded.loss_weighting == "bsmntw"


def test_a_damaged_path_is_a_bad_file_of_its_row(copy: Path) -> None:
    path = next((copy / "made/trajectory").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    place = rf"metadata\.json:\d+:trajectory: .*{path.name}"
    with pytest.raises(UsageError, match=place):
        run(distill(copy, ALONG))
    run(distill(copy, ALONG, on_bad_sample="skip", output_path=copy / "kept"))
    assert len(log(copy / "kept")) == 5
    path.write_bytes(content[:-8])
    with pytest.raises(UsageError, match=place):
        run(distill(copy, ALONG, output_path=copy / "third"))
