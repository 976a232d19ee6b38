"""Direct distillation: the student's whole sampler, from its row's noise, is compared
with the teacher's image.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    DIRECT_DISTILL,
    SFT,
    GenerateConfig,
    Pipeline,
    Sample,
    SampleKey,
    Task,
    TrainConfig,
    TrainingModule,
    UsageError,
    generate,
    run,
)
from dstrain.graph import make_plan
from dstrain.pipeline import integrate, seeded_noise
from dstrain.plugin import Column, Constant, FlowMatchSchedule, LatentConstraint
from dstrain.runs.loop import steps
from dstrain.runs.resolve import resolve
from dstrain.training.distill import direct_distill
from torch import Tensor

from tests.support.family import build, with_two_experts
from tests.support.runs import config, log, outcome, project, same, training_run
from tests.support.training_batches import (
    assert_batch_equals_its_samples,
    batch,
    gradients,
)

pytestmark = pytest.mark.usefixtures("tiny")

SCHEDULE = FlowMatchSchedule(shift=3.0, latents_per_token=1)
LATENTS = torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(9))
SEEDS = [5, 7]
NOISE = torch.cat([seeded_noise((1, 4, 2, 2), seed) for seed in SEEDS])


def hold_nothing(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
    return LatentConstraint(latents, timestep)


def loss(
    predict: Any, count: int, constrain_latents: Any = hold_nothing, **given: Any
) -> Tensor:
    return direct_distill(
        predict,
        LATENTS,
        count,
        SEEDS,
        **given,
        sampler=partial(integrate, SCHEDULE, constrain_latents),
    )


@pytest.mark.parametrize("count", [1, 4])
def test_a_student_that_ends_at_the_teachers_image_costs_nothing_and_another_its_square(
    count: int,
) -> None:
    assert loss(
        lambda noisy_latents, timestep: NOISE - LATENTS, count
    ).tolist() == pytest.approx([0, 0], abs=1e-12)
    assert loss(
        lambda noisy_latents, timestep: NOISE - LATENTS - 2, count
    ).tolist() == pytest.approx([4, 4])


def test_the_student_walks_the_inference_schedule_from_the_noise_of_its_seeds() -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    loss(
        lambda noisy_latents, timestep: (
            seen.append((noisy_latents, timestep)) or noisy_latents * 0
        ),
        3,
    )
    assert torch.equal(seen[0][0], NOISE)
    assert all(timestep.dtype == torch.float32 for _, timestep in seen)
    wanted = (SCHEDULE.sigmas(3, 4)[:3] * 1000).tolist()
    assert [timestep.tolist() for _, timestep in seen] == [
        [sigma, sigma] for sigma in wanted
    ]


def test_gradients_go_through_every_step() -> None:
    """The final latents of a linear student are known in closed form, and so is the
    gradient of its one weight.
    """
    weight = torch.tensor(0.3, dtype=torch.float32, requires_grad=True)
    loss(lambda noisy_latents, timestep: weight * noisy_latents, 3).sum().backward()
    known = torch.tensor(0.3, requires_grad=True)
    factor = torch.prod(1 + SCHEDULE.sigmas(3, 4).diff() * known)
    (factor * NOISE - LATENTS).square().flatten(1).mean(1).sum().backward()
    torch.testing.assert_close(weight.grad, known.grad)


def test_constrained_latents_are_seen_at_every_step_and_what_is_masked_costs_nothing() -> (
    None
):
    mask = torch.zeros(2, 1, 2, 2)
    mask[..., 0] = 1

    def constrain_latents(
        latents: Tensor, timestep: Tensor, noise: Tensor
    ) -> LatentConstraint:
        return LatentConstraint(latents * mask + 7 * (1 - mask), timestep, mask)

    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        assert bool((noisy_latents[..., 1] == 7).all())
        return NOISE - LATENTS - 3

    assert loss(predict, 4, constrain_latents).tolist() == pytest.approx([9, 9])


def test_the_noise_of_a_device_that_is_absent_is_refused() -> None:
    assert torch.equal(
        loss(lambda n, t: n, 1), loss(lambda n, t: n, 1, rand_device=["cpu", ""])
    )
    with pytest.raises(UsageError, match="noise cannot be drawn on device 'mps' here"):
        loss(lambda n, t: n, 1, rand_device=["cpu", "mps"])


# Runs of the family `tiny`.

CELLS = [(0, 2), (11, 2), (10**17, 2), (3, 1), (4, 1), (5, 2)]
"""seed and num_inference_steps of each row."""


def distilling(folder: Path, **columns: Any) -> Path:
    """The project of `runs`, with the columns that the task reads."""
    project(folder)
    rows = json.loads((folder / "data/metadata.json").read_text())
    for row, (seed, count) in zip(rows, CELLS, strict=True):
        row |= {
            "seed": seed,
            "num_inference_steps": count,
            "rand_device": "cpu",
            "cfg_scale": 1,
            **columns,
        }
    (folder / "data/metadata.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distilling(tmp_path_factory.mktemp("project"))


def distill(folder: Path, **changes: Any) -> TrainConfig:
    return config(folder, **{"task": "direct_distill", **changes})


def test_what_the_pipeline_itself_draws_from_a_seed_costs_nothing(here: Path) -> None:
    """So the loss runs the sampler that inference runs, bit for bit, from the same
    noise.
    """
    ready = training_run(distill(here))
    module, pipe = ready.module.eval(), ready.module.pipeline
    made: list[Tensor] = []
    pipe(
        prompt="dog",
        seed=11,
        num_inference_steps=3,
        height=16,
        width=24,
        on_step=lambda i, x: made.append(x),
    )
    sample = ready.source.sample(1)
    plan = module.plan(sample.inputs)
    values = {
        **module.preprocess(sample, plan),
        "num_inference_steps": 3,
        "input_latents": made[-1],
    }
    dog = module.preprocess(
        Sample({**sample.values, "prompt": "dog"}, sample.inputs), plan
    )
    crossed = Sample(
        {**values, "prompt_emb": dog["prompt_emb"], "prompt_mask": dog["prompt_mask"]},
        sample.inputs,
    )
    module.stage = "train"
    with torch.no_grad():
        assert module.losses([crossed], [SampleKey(0, 0, 0, 1)]).tolist() == [0]


def test_a_batch_has_the_losses_and_gradients_of_its_samples(here: Path) -> None:
    """Rows 0 and 2 differ in seed and in the length of their texts."""
    ready = training_run(distill(here, trainable_models="dit"))
    assert_batch_equals_its_samples(ready, (0, 2))


def test_rows_of_one_batch_have_one_number_of_steps(here: Path) -> None:
    dataset = resolve(distill(here)).dataset
    groups = {dataset.signature(row): [] for row in range(6)}
    for row in range(6):
        groups[dataset.signature(row)].append(row)
    assert sorted(groups.values()) == [
        [0, 2],
        [1, 5],
        [3],
        [4],
    ]  # rows take turns in two sizes
    numbers = list(steps(training_run(distill(here, batch_size=6))))
    assert [n["epoch"] for n in numbers] == [0] * 4


@pytest.mark.parametrize(
    "flags", [{}, {"trainable_models": "dit"}, {"trainable_models": "text_encoder"}]
)
def test_two_stages_train_as_one_bit_for_bit(
    flags: dict[str, str], here: Path, tmp_path: Path
) -> None:
    run(
        distill(here, output_path=tmp_path / "one", batch_size=2, num_epochs=2, **flags)
    )
    both = {
        **flags,
        "feature_cache": tmp_path / "cache",
        "batch_size": 2,
        "num_epochs": 2,
    }
    run(
        distill(
            here,
            task="direct_distill:data_process",
            output_path=tmp_path / "two",
            **both,
        )
    )
    run(
        distill(here, task="direct_distill:train", output_path=tmp_path / "two", **both)
    )
    assert same(outcome(tmp_path / "one"), outcome(tmp_path / "two"))


@pytest.mark.parametrize(
    "flag", ["use_gradient_checkpointing", "use_gradient_checkpointing_offload"]
)
def test_checkpointing_across_steps_changes_no_gradient_by_a_bit(
    flag: str, tmp_path: Path
) -> None:
    """The denoiser has dropout, which must be the same when activations are computed
    again.
    """
    folder = distilling(
        tmp_path,
    )
    plain, checked = (
        training_run(distill(folder, trainable_models="dit", **flags))
        for flags in ({}, {flag: True})
    )
    rows = batch(plain, (0, 2))
    assert torch.equal(plain.module(rows), checked.module(rows))
    assert same(gradients(plain.module, [rows]), gradients(checked.module, [rows]))


def test_a_module_made_in_a_script_knows_the_tasks_inputs(here: Path) -> None:
    ready = training_run(distill(here))
    pipeline = replace(ready.module.pipeline, spec=build("base"))
    module = TrainingModule(pipeline, DIRECT_DISTILL)
    module.trained = ready.module.trained
    assert torch.equal(module(batch(ready, (1,))), ready.module(batch(ready, (1,))))


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        (
            "cfg_scale",
            4,
            "expected 1 or a blank value, got 4: the student runs without guidance",
        ),
        ("num_inference_steps", 0, "expected 1 or more, got 0"),
        ("seed", -1, "expected 0 or more, got -1"),
        ("rand_device", "mps", "noise cannot be drawn on device 'mps' here"),
    ],
)
def test_rows_that_cannot_be_distilled_are_all_named_before_anything_is_loaded(
    column: str, value: Any, what: str, tmp_path: Path
) -> None:
    bad = distilling(tmp_path, **{column: value})
    with pytest.raises(UsageError) as caught:
        run(distill(bad, model_paths='["absent.safetensors"]', variant="base"))
    assert caught.value.what == "6 bad values"
    assert caught.value.help_lines[0].startswith(f"metadata.json:1:{column}: ")
    assert what in caught.value.help_lines[0]


def test_blank_cells_are_one_on_the_cpu(here: Path, tmp_path: Path) -> None:
    blank = distilling(tmp_path, cfg_scale="", rand_device="")
    losses = [
        [n["loss"] for n in steps(training_run(distill(folder)))]
        for folder in (here, blank)
    ]
    assert losses[0] == losses[1]


def test_a_column_that_is_missing_is_asked_for(tmp_path: Path) -> None:
    project(tmp_path)
    with pytest.raises(
        UsageError, match="needs num_inference_steps, and there is no column"
    ):
        run(distill(tmp_path, dry_run=True))


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
    with pytest.raises(UsageError) as caught:
        resolve(distill(here, **{flag: value}))
    assert caught.value.where == f"--{flag}"
    assert "has no effect: the loss of task direct_distill" in caught.value.what
    resolve(config(here, **{flag: value}))


def test_extra_inputs_may_name_the_tasks_own(here: Path) -> None:
    given = "seed,rand_device,num_inference_steps,cfg_scale"
    assert resolve(distill(here, extra_inputs=given)).dataset.unused_columns == ()


def test_the_cached_plan_has_what_the_loss_reads(here: Path) -> None:
    plan = resolve(distill(here)).plan(
        frozenset({"prompt", "input_image", "seed", "num_inference_steps"})
    )
    assert set(plan.cached_values) == {
        "input_latents",
        "prompt_emb",
        "prompt_mask",
        "seed",
        "num_inference_steps",
    }


def test_a_student_comes_nearer_to_what_its_teacher_made_in_many_steps(
    tmp_path: Path,
) -> None:
    """Small, but whole: the teacher's dataset from the command line's own function,
    then both stages.
    """
    project(tmp_path)
    rows = [
        {"prompt": "dog", "seed": seed, "num_inference_steps": 2} for seed in range(8)
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    model: dict[str, Any] = {
        "model": "tiny",
        "variant": "base",
        "model_paths": distill(tmp_path).model_paths,
    }
    table, made = tmp_path / "prompts.json", tmp_path / "made"
    generate(
        GenerateConfig(**model, dataset=table, num_inference_steps=12, output=made)
    )
    flags = {
        "dataset_base_path": made,
        "feature_cache": tmp_path / "cache",
        "trainable_models": "dit",
    }
    run(distill(tmp_path, task="direct_distill:data_process", **flags))
    run(
        distill(
            tmp_path,
            task="direct_distill:train",
            batch_size=8,
            num_epochs=60,
            learning_rate=1e-2,
            **flags,
        )
    )
    losses = [numbers["loss"] for numbers in log(tmp_path / "out")]
    assert losses[-1] < losses[0] / 2


# Tasks with inputs.


def test_an_input_of_task_and_variant_is_refused_naming_both() -> None:
    task = Task.of("styled", direct_distill, inputs={"prompt": Column("style")})
    with pytest.raises(
        UsageError, match="task styled: its input 'prompt' is also one of tiny base"
    ):
        build("base").with_task_inputs(task)


def test_the_loss_is_given_a_list_unless_values_are_alike() -> None:
    inputs = {
        "seed": Column("seed", "integer"),
        "steps": Column("steps", same_in_batch=True),
        "scale": Constant(1.0),
    }
    assert Task.of("one", direct_distill, inputs=inputs).listed == {"seed"}


def test_a_task_that_runs_the_sampler_uses_every_part_of_a_denoiser() -> None:
    spec = with_two_experts()
    inputs = frozenset({"prompt", "input_image", "seed", "num_inference_steps"})
    assert make_plan(spec, inputs, SFT, ("dit2",)).components["train"] == ("dit2",)
    assert make_plan(spec, inputs, DIRECT_DISTILL, ("dit2",)).components["train"] == (
        "dit",
        "dit2",
    )


def test_the_pipeline_of_inference_takes_no_input_of_a_task(here: Path) -> None:
    pipe: Pipeline = training_run(config(here)).module.pipeline
    with pytest.raises(UsageError, match="takes no argument 'cfg_scale'"):
        pipe(prompt="dog", cfg_scale=1)
