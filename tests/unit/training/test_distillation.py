"""Whole runs that distill, directly or along trajectories, from what `dstrain generate`
made.
"""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    DIRECT_DISTILL,
    SFT,
    TRAJECTORY_IMITATION,
    Sample,
    SampleKey,
    TrainConfig,
    TrainingModule,
    UsageError,
    run,
)
from dstrain.graph import make_plan
from dstrain.runs.resolve import resolve
from dstrain.training import LATENTS
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.distilling import distillable
from tests.support.family import build, with_two_experts
from tests.support.runs import (
    config,
    files,
    log,
    outcome,
    project,
    same,
    training_run,
)
from tests.support.training_batches import (
    assert_batch_equals_its_samples,
    batch,
    gradients,
)

# The dataset is made by plugin-tools.
pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.needs_plugin]
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


@BOTH
def test_of_a_trajectory_the_image_is_neither_decoded_nor_encoded(
    task: str, here: Path
) -> None:
    setup = resolve(distill(here, task))
    plan = setup.plan(setup.dataset.input_sets[0])
    values = {"num_inference_steps", "prompt_emb", "prompt_mask"}
    values |= {"trajectory"} if task == ALONG else {"seed", "input_latents"}
    assert set(plan.cached_values) == values
    assert ("vae" in plan.components[""]) == (task == DIRECT)


def test_what_the_pipeline_itself_draws_from_a_seed_costs_nothing(here: Path) -> None:
    """So the loss runs the sampler that inference runs, bit for bit, from the same
    noise.
    """
    ready = training_run(distill(here, DIRECT))
    module, pipe = ready.module.eval(), ready.module.pipeline
    made: list[Tensor] = []
    given = {"seed": 1, "num_inference_steps": 3, "height": 16, "width": 16}
    pipe(prompt="dog", on_step=lambda i, x: made.append(x), **given)
    sample = ready.source.sample(1)
    dog = Sample({**sample.values, "prompt": "dog"}, sample.inputs)
    values = module.preprocess(dog, module.plan(sample.inputs))
    values |= {"num_inference_steps": 3, "input_latents": made[-1]}
    module.stage = "train"
    with torch.no_grad():
        losses = module.losses([Sample(values, sample.inputs)], [SampleKey(0, 0, 0, 1)])
    assert losses.tolist() == [0]


def losses_of(folder: Path, rows: tuple[int, ...]) -> Tensor:
    ready = training_run(distill(folder, ALONG))
    one = batch(ready, rows)
    with torch.no_grad():
        return ready.module.eval().losses(one.samples, one.micro_batch.keys)


def test_the_student_starts_as_its_teacher_if_it_has_as_many_steps(
    tmp_path: Path,
) -> None:
    """So the loss runs the same model at the same latents as inference did; with fewer
    steps, and with guidance, there is something to learn.
    """
    twice = {"steps": (2,) * 6}
    equal = distillable(tmp_path / "equal", num_inference_steps=2, **twice)
    assert losses_of(equal, (0, 1)).max() < 1e-9
    for steps, scale in ((6, None), (2, 3.0)):
        teacher = {"num_inference_steps": steps, "guidance_scale": scale, **twice}
        other = distillable(tmp_path / str(steps), **teacher)
        assert losses_of(other, (0, 1)).min() > 1e-4


def test_a_module_made_in_a_script_knows_the_tasks_inputs(here: Path) -> None:
    ready = training_run(distill(here, DIRECT))
    pipeline = replace(ready.module.pipeline, spec=build("base"))
    module = TrainingModule(pipeline, DIRECT_DISTILL)
    module.trained = ready.module.trained
    assert torch.equal(module(batch(ready, (1,))), ready.module(batch(ready, (1,))))


def put(folder: Path, **columns: Any) -> None:
    """Give every row of what was made these cells."""
    table = folder / "made/metadata.csv"
    with table.open(newline="") as file:
        rows = [{**row, **columns} for row in csv.DictReader(file)]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


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
    for row, line in enumerate(caught.value.help_lines, 2):
        assert re.match(rf"metadata\.csv:{row}:{column}: .*{said}", line)
    assert len(caught.value.help_lines) == 6


def test_absent_and_blank_cells_are_one_on_the_cpu(here: Path, copy: Path) -> None:
    run(distill(here, DIRECT, output_path=copy / "absent"))
    for scale, device in (("", ""), (1, "cpu")):
        put(copy, cfg_scale=scale, rand_device=device)
        run(distill(copy, DIRECT, output_path=copy / f"out{scale}"))
        assert log(copy / f"out{scale}") == log(copy / "absent")


@pytest.mark.parametrize(
    ("task", "said"),
    [(DIRECT, "num_inference_steps"), (ALONG, r"(?s)'trajectory'.*--trajectory ")],
)
def test_a_column_that_is_missing_is_asked_for(
    task: str, said: str, tmp_path: Path
) -> None:
    project(tmp_path)
    with pytest.raises(UsageError, match=said):
        run(config(tmp_path, task=task, dry_run=True))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("timestep_sampling", "uniform"),
        ("loss_weighting", "none"),
        ("min_timestep_boundary", 0.5),
        ("max_timestep_boundary", 0.5),
    ],
)
def test_options_that_do_nothing_here_are_refused(
    flag: str, value: Any, here: Path
) -> None:
    with pytest.raises(UsageError, match=f"--{flag}: .*direct_distill"):
        resolve(distill(here, DIRECT, **{flag: value}))
    resolve(config(here, **{flag: value}))


def test_extra_inputs_may_name_the_tasks_own_and_inference_has_none(copy: Path) -> None:
    put(copy, cfg_scale=1, rand_device="cpu")
    given = "seed,rand_device,num_inference_steps,cfg_scale"
    dataset = resolve(distill(copy, DIRECT, extra_inputs=given)).dataset
    assert dataset.unused_columns == ("trajectory",)
    pipe = training_run(config(copy)).module.pipeline
    with pytest.raises(UsageError, match="'cfg_scale'"):
        pipe(prompt="dog", cfg_scale=1)


def test_a_damaged_path_is_a_bad_file_of_its_row(copy: Path) -> None:
    path = next((copy / "made/trajectory").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    place = rf"metadata\.csv:\d+:trajectory: .*{path.name}"
    with pytest.raises(UsageError, match=place):
        run(distill(copy, ALONG))
    run(distill(copy, ALONG, on_bad_sample="skip", output_path=copy / "kept"))
    assert len(log(copy / "kept")) == 5
    path.write_bytes(content[:-8])
    with pytest.raises(UsageError, match=place):
        run(distill(copy, ALONG, output_path=copy / "third"))


def test_views_of_the_images_are_refused(here: Path) -> None:
    for flag in ({"flip": True}, {"crops": 2}):
        with pytest.raises(UsageError, match="'trajectory'"):
            run(distill(here, ALONG, **flag))


def test_a_changed_path_is_another_value_of_the_cache(copy: Path) -> None:
    cache = {"feature_cache": copy / "cache"}
    run(distill(copy, f"{ALONG}:data_process", **cache))
    path = next((copy / "made/trajectory").iterdir())
    tensors = load_file(path)
    save_file({**tensors, LATENTS: tensors[LATENTS] + 1}, path)
    run(distill(copy, f"{ALONG}:data_process", **cache))
    both: dict[str, Any] = {"max_steps": 6, "save_steps": 6}
    run(distill(copy, f"{ALONG}:train", output_path=copy / "two", **cache, **both))
    run(distill(copy, ALONG, output_path=copy / "one", **both))
    assert same(files(copy / "one"), files(copy / "two"))


def test_a_dry_run_plans_memory_by_the_shapes_of_the_paths(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(distill(here, ALONG, dry_run=True))
    out = capsys.readouterr().out
    assert re.search("activations +[0-9.]+ KiB", out)
    assert "metadata.csv:" in out
