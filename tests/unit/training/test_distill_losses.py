"""What distillation compares: the teacher's image, or its way between two sigmas."""

from functools import partial
from typing import Any

import pytest
import torch
from dstrain import DIRECT_DISTILL, TRAJECTORY_IMITATION, UsageError
from dstrain.pipeline import inference_sigmas, integrate, seeded_noise
from dstrain.plugin import FlowMatchSchedule, LatentConstraint
from dstrain.training.losses import LATENTS, SIGMAS
from torch import Tensor

from tests.support.runs import same

SCHEDULE = FlowMatchSchedule(shift=3.0, latents_per_token=1)
GENERATOR = torch.Generator().manual_seed(9)
IMAGES = torch.randn(2, 4, 2, 2, generator=GENERATOR)
SEEDS = [5, 7]
NOISE = torch.cat([seeded_noise((1, 4, 2, 2), seed) for seed in SEEDS])
STEPS = 3
PATH = torch.randn(2, STEPS + 1, 4, 2, 2, generator=GENERATOR)
"""The latents of two samples."""
SIGMAS_OF_STEPS = SCHEDULE.sigmas(STEPS, 4)
TIMESTEPS = (SIGMAS_OF_STEPS[:STEPS] * 1000).tolist()
MASK = torch.tensor([1.0, 0.0]).expand(2, 1, 2, 2)


def hold_nothing(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
    return LatentConstraint(latents, timestep)


def hold_right(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
    """Keep what is masked out at 7."""
    return LatentConstraint(latents * MASK + 7 * (1 - MASK), timestep, MASK)


def direct(
    predict: Any, count: int, constrain_latents: Any = hold_nothing, **given: Any
) -> Tensor:
    given["sampler"] = partial(integrate, SCHEDULE, constrain_latents)
    loss: Any = DIRECT_DISTILL.loss.function
    found: Tensor = loss(predict, IMAGES, count, SEEDS, **given)
    return found


def along(predict: Any, constrain_latents: Any = hold_nothing, **given: Any) -> Tensor:
    trajectory = [{LATENTS: one[None], SIGMAS: SIGMAS_OF_STEPS[None]} for one in PATH]
    trajectory[-1][SIGMAS] = given.get("sigmas", SIGMAS_OF_STEPS)[None]
    loss: Any = TRAJECTORY_IMITATION.loss.function
    found: Tensor = loss(
        predict,
        given.get("trajectory", trajectory),
        given.get("steps", STEPS),
        given.get("loss_weight"),
        constrain_latents=constrain_latents,
        inference_sigmas=partial(inference_sigmas, SCHEDULE),
    )
    return found


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("error", "cost"), [(0, 0), (2, 4)])
def test_a_student_that_ends_at_the_teachers_image_costs_nothing_and_another_its_square(
    error: float, cost: float, count: int
) -> None:
    found = direct(lambda noisy_latents, timestep: NOISE - IMAGES - error, count)
    assert found.tolist() == pytest.approx([cost, cost], abs=1e-12)


def test_the_student_walks_the_inference_schedule_from_the_noise_of_its_seeds() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        seen.append((noisy_latents, timestep))
        return noisy_latents * 0

    direct(predict, STEPS)
    assert torch.equal(seen[0][0], NOISE)
    assert all(timestep.dtype == torch.float32 for _, timestep in seen)
    steps = [[one] * 2 for one in TIMESTEPS]
    assert [timestep.tolist() for _, timestep in seen] == steps


def test_constrained_latents_are_seen_and_what_is_masked_costs_nothing() -> None:
    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        assert bool((noisy_latents[..., 1] == 7).all())
        return NOISE - IMAGES - 3

    assert direct(predict, 4, hold_right).tolist() == pytest.approx([9, 9])


def test_the_noise_of_a_device_that_is_absent_is_refused() -> None:
    plain = direct(lambda n, t: n, 1)
    assert torch.equal(plain, direct(lambda n, t: n, 1, rand_device=["cpu", ""]))
    with pytest.raises(UsageError, match=r"rand_device: .*'mps'"):
        direct(lambda n, t: n, 1, rand_device=["cpu", "mps"])


def by_teacher(error: Any = 0, each: float = 0) -> Any:
    """The teacher's mean velocity of each step plus this error, and `each` times the step."""
    steps = (PATH.diff(dim=1) / SIGMAS_OF_STEPS.diff().view(STEPS, 1, 1, 1)).unbind(1)
    wanted = dict(zip(TIMESTEPS, steps, strict=True))

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        (time,) = timestep.unique().tolist()
        return wanted[time] + error + each * TIMESTEPS.index(time)

    return predict


@pytest.mark.parametrize(("each", "cost"), [(0.0, 0.0), (1.0, (0 + 1 + 4) / STEPS)])
def test_the_teachers_own_velocities_cost_nothing_and_others_their_mean_square(
    each: float, cost: float
) -> None:
    found = along(by_teacher(each=each)).tolist()
    assert found == pytest.approx([cost, cost], abs=1e-6)


def test_what_is_kept_fixed_is_seen_at_every_step_and_costs_nothing() -> None:
    noises: list[Tensor] = []

    def hold(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
        noises.append(noise)
        return hold_right(latents, timestep, noise)

    right = by_teacher(2)

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        assert bool((latents[..., 1] == 7).all())
        return right(latents, timestep)

    assert along(predict, hold).tolist() == pytest.approx([4, 4])
    assert same(noises, [PATH[:, 0]] * STEPS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 2}, "sigmas .* 2 steps "),
        (
            {"sigmas": FlowMatchSchedule(shift=5.0).sigmas(STEPS, 4)},
            r"\[1.0, 0.9091, 0.7143, 0.0\].*\[1.0, 0.8571, 0.6, 0.0\]",
        ),
        ({"trajectory": [{"image": PATH}]}, "image.*latents .*sigmas"),
    ],
)
def test_a_path_of_other_steps_sigmas_or_tensors_is_refused(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=f"(?s)trajectory: .*{said}.*--trajectory "):
        along(lambda latents, timestep: latents, **given)
