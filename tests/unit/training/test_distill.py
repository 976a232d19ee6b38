"""Direct distillation: the student's whole sampler, from its row's noise, is compared
with the teacher's image.
"""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    DIRECT_DISTILL,
    Sample,
    SampleKey,
    TrainConfig,
    TrainingModule,
    UsageError,
    run,
)
from dstrain.pipeline import integrate, seeded_noise
from dstrain.plugin import FlowMatchSchedule, LatentConstraint
from dstrain.runs.resolve import resolve
from torch import Tensor

from tests.support.family import build
from tests.support.runs import config, log, project, training_run
from tests.support.training_batches import batch

pytestmark = pytest.mark.usefixtures("tiny")

SCHEDULE = FlowMatchSchedule(shift=3.0, latents_per_token=1)
LATENTS = torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(9))
SEEDS = [5, 7]
NOISE = torch.cat([seeded_noise((1, 4, 2, 2), seed) for seed in SEEDS])
LOSS: Any = DIRECT_DISTILL.loss.function


def hold_nothing(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
    return LatentConstraint(latents, timestep)


def loss(
    predict: Any, count: int, constrain_latents: Any = hold_nothing, **given: Any
) -> Tensor:
    sampler = partial(integrate, SCHEDULE, constrain_latents)
    found: Tensor = LOSS(predict, LATENTS, count, SEEDS, **given, sampler=sampler)
    return found


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("error", "cost"), [(0, 0), (2, 4)])
def test_a_student_that_ends_at_the_teachers_image_costs_nothing_and_another_its_square(
    error: float, cost: float, count: int
) -> None:
    found = loss(lambda noisy_latents, timestep: NOISE - LATENTS - error, count)
    assert found.tolist() == pytest.approx([cost, cost], abs=1e-12)


def test_the_student_walks_the_inference_schedule_from_the_noise_of_its_seeds() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        seen.append((noisy_latents, timestep))
        return noisy_latents * 0

    loss(predict, 3)
    assert torch.equal(seen[0][0], NOISE)
    assert all(timestep.dtype == torch.float32 for _, timestep in seen)
    wanted = (SCHEDULE.sigmas(3, 4)[:3] * 1000).tolist()
    assert [timestep.tolist() for _, timestep in seen] == [[one] * 2 for one in wanted]


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
    plain = loss(lambda n, t: n, 1)
    assert torch.equal(plain, loss(lambda n, t: n, 1, rand_device=["cpu", ""]))
    with pytest.raises(UsageError, match=r"rand_device: .*'mps'"):
        loss(lambda n, t: n, 1, rand_device=["cpu", "mps"])


CELLS = [(0, 2), (11, 2), (10**17, 2), (3, 1), (4, 1), (5, 2)]
"""seed and num_inference_steps of each row."""


def distilling(folder: Path, **columns: Any) -> Path:
    """The project of `runs`, with the columns that the task reads."""
    project(folder)
    table = folder / "data/metadata.json"
    rows = json.loads(table.read_text())
    for row, (seed, count) in zip(rows, CELLS, strict=True):
        row |= {"seed": seed, "num_inference_steps": count}
        row |= {"rand_device": "cpu", "cfg_scale": 1, **columns}
    table.write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distilling(tmp_path_factory.mktemp("project"))


def distill(folder: Path, stage: str = "", **changes: Any) -> TrainConfig:
    return config(folder, task=f"direct_distill{stage}", **changes)


def test_what_the_pipeline_itself_draws_from_a_seed_costs_nothing(here: Path) -> None:
    """So the loss runs the sampler that inference runs, bit for bit, from the same
    noise.
    """
    ready = training_run(distill(here))
    module, pipe = ready.module.eval(), ready.module.pipeline
    made: list[Tensor] = []
    given = {"seed": 11, "num_inference_steps": 3, "height": 16, "width": 24}
    pipe(prompt="dog", on_step=lambda i, x: made.append(x), **given)
    sample = ready.source.sample(1)
    dog = Sample({**sample.values, "prompt": "dog"}, sample.inputs)
    values = module.preprocess(dog, module.plan(sample.inputs))
    values |= {"num_inference_steps": 3, "input_latents": made[-1]}
    module.stage = "train"
    with torch.no_grad():
        losses = module.losses([Sample(values, sample.inputs)], [SampleKey(0, 0, 0, 1)])
    assert losses.tolist() == [0]


def test_a_module_made_in_a_script_knows_the_tasks_inputs(here: Path) -> None:
    ready = training_run(distill(here))
    pipeline = replace(ready.module.pipeline, spec=build("base"))
    module = TrainingModule(pipeline, DIRECT_DISTILL)
    module.trained = ready.module.trained
    assert torch.equal(module(batch(ready, (1,))), ready.module(batch(ready, (1,))))


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("cfg_scale", 4, "1 .*got 4"),
        ("num_inference_steps", 0, "1 .*got 0"),
        ("seed", -1, "0 .*got -1"),
        ("rand_device", "mps", "'mps'"),
    ],
)
def test_rows_that_cannot_be_distilled_are_all_named_before_anything_is_loaded(
    column: str, value: Any, said: str, tmp_path: Path
) -> None:
    bad = distilling(tmp_path, **{column: value})
    with pytest.raises(UsageError) as caught:
        run(distill(bad, model_paths='["absent.safetensors"]', variant="base"))
    for row, line in enumerate(caught.value.help_lines, 1):
        assert re.match(rf"metadata\.json:{row}:{column}: .*{said}", line)
    assert len(caught.value.help_lines) == 6


def test_blank_cells_are_one_on_the_cpu(here: Path, tmp_path: Path) -> None:
    blank = distilling(tmp_path, cfg_scale="", rand_device="")
    for name, folder in (("a", here), ("b", blank)):
        run(distill(folder, output_path=tmp_path / name))
    assert log(tmp_path / "a") == log(tmp_path / "b")


def test_a_column_that_is_missing_is_asked_for(tmp_path: Path) -> None:
    project(tmp_path)
    with pytest.raises(UsageError, match="num_inference_steps"):
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
    with pytest.raises(UsageError, match=f"--{flag}: .*direct_distill"):
        resolve(distill(here, **{flag: value}))
    resolve(config(here, **{flag: value}))


def test_extra_inputs_may_name_the_tasks_own(here: Path) -> None:
    given = "seed,rand_device,num_inference_steps,cfg_scale"
    assert resolve(distill(here, extra_inputs=given)).dataset.unused_columns == ()


def test_the_pipeline_of_inference_takes_no_input_of_a_task(here: Path) -> None:
    pipe = training_run(config(here)).module.pipeline
    with pytest.raises(UsageError, match="'cfg_scale'"):
        pipe(prompt="dog", cfg_scale=1)
