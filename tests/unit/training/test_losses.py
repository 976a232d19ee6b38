"""Losses are per sample, in fp32, however a global batch is cut up."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Batch, Rng, SampleKey, TimestepSampler, UsageError, flow_match
from dstrain.plugin import FlowMatchSchedule, LatentConstraint
from dstrain.training import split_across_ranks
from dstrain.training.losses import LossOptions
from torch import Tensor

from tests.support.runs import config, project, training_run
from tests.support.training_batches import gradients

SCHEDULE = FlowMatchSchedule(shift=3.0)
KEYS = [SampleKey(0, 0, 0, row) for row in range(3)]
LATENTS = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
NOISE = Rng(KEYS).normal("noise", LATENTS.shape[1:])
SIGMA = TimestepSampler(SCHEDULE).draw(Rng(KEYS))


def hold_nothing(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
    return LatentConstraint(latents, timestep)


def loss(
    predict: Any,
    latents: Tensor = LATENTS,
    constrain_latents: Any = hold_nothing,
    loss_weight: Tensor | None = None,
    weighting: Any = "none",
    **options: Any,
) -> Tensor:
    return flow_match(
        predict,
        latents,
        loss_weight,
        timestep_sampler=TimestepSampler(SCHEDULE, weighting=weighting),
        constrain_latents=constrain_latents,
        loss_options=LossOptions(**options),
        rng=Rng(KEYS[: len(latents)]),
    )


def off_by(error: Tensor | float) -> Any:
    return lambda noisy_latents, timestep: NOISE - LATENTS + error


def mixture(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
    return noisy_latents


def test_the_right_prediction_costs_nothing_and_another_its_square() -> None:
    assert loss(off_by(0), weighting="bsmntw").tolist() == [0, 0, 0]
    assert loss(off_by(2)).tolist() == pytest.approx([4, 4, 4])


def test_the_denoiser_sees_the_mixture_and_an_fp32_timestep_per_sample() -> None:
    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        level = SIGMA.view(-1, 1, 1, 1)
        assert torch.equal(noisy_latents, (1 - level) * LATENTS + level * NOISE)
        assert timestep.dtype == torch.float32
        assert torch.equal(timestep, SIGMA * 1000)
        return noisy_latents

    assert loss(predict).shape == (3,)


def test_samples_are_weighed_by_their_own_sigma() -> None:
    weight = TimestepSampler(SCHEDULE).weight(SIGMA)
    weighed = loss(mixture, weighting="bsmntw")
    assert torch.allclose(weighed, loss(mixture) * weight)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"loss": "mae"}, lambda sigma: 2.0),
        ({"loss": "huber"}, lambda sigma: pseudo_huber(0.1)),
        ({"loss": "huber", "delta": 3.0}, lambda sigma: pseudo_huber(3.0)),
        (
            {"loss": "huber", "schedule": "exponential"},
            lambda sigma: pseudo_huber(math.exp(math.log(0.1) * sigma)),
        ),
        (
            {"loss": "huber", "schedule": "snr"},
            lambda sigma: pseudo_huber(0.9 / (1 + sigma / (1 - sigma)) ** 2 + 0.1),
        ),
    ],
)
def test_an_error_of_two_counts_as_the_options_say(options: Any, wanted: Any) -> None:
    found = loss(off_by(2), **options).tolist()
    assert found == pytest.approx([wanted(sigma) for sigma in SIGMA.tolist()], 1e-5)


def pseudo_huber(delta: float) -> float:
    return 2 * delta * (math.sqrt(4 + delta**2) - delta)


def test_noise_is_offset_by_channel_and_perturbed_for_the_denoiser_alone() -> None:
    seen = {}

    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        level = SIGMA.view(-1, 1, 1, 1)
        seen["noise"] = (noisy_latents - (1 - level) * LATENTS) / level
        return torch.zeros_like(noisy_latents)

    whole = LATENTS.shape[1:]
    loss(predict, input_perturbation=0.3)
    more = 0.3 * Rng(KEYS).normal("input_perturbation", whole)
    torch.testing.assert_close(seen["noise"], NOISE + more, rtol=1e-3, atol=1e-4)
    assert torch.equal(loss(off_by(0), input_perturbation=0.3), torch.zeros(3))
    offset = 0.2 * Rng(KEYS).normal("noise_offset", (2, 1, 1))
    found = loss(predict, noise_offset=0.2)
    wanted = (NOISE + offset - LATENTS).square().flatten(1).mean(1)
    torch.testing.assert_close(found, wanted)


def test_a_bf16_prediction_is_compared_in_fp32() -> None:
    half = (NOISE - LATENTS).bfloat16()
    losses = loss(lambda noisy_latents, timestep: half)
    assert losses.dtype == torch.float32
    error = half.float() - (NOISE - LATENTS)
    assert torch.allclose(losses, error.square().flatten(1).mean(1))


@pytest.fixture(scope="module")
def ready(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that trains the denoiser, whose even rows are of one size."""
    here = project(tmp_path_factory.mktemp("project"))
    return training_run(config(here, trainable_models="dit"))


def gradient(
    ready: Any, count: int, batch_size: int, processes: int
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a step over `count` samples, summed over processes."""
    keys = [SampleKey(0, 0, number // 3, 2 * (number % 3)) for number in range(count)]
    batches = [
        Batch(micro, [ready.data.source.sample(key.row) for key in micro.keys])
        for rank in range(processes)
        for micro in split_across_ranks(keys, batch_size, rank, processes)
    ]
    total = sum(float(ready.module(batch).detach()) for batch in batches)
    return total, gradients(ready.module, batches)


@pytest.mark.parametrize(
    ("count", "batch_size", "processes"),
    [
        (4, 1, 1),
        (4, 2, 1),
        (4, 1, 2),
        (4, 1, 4),
        (4, 2, 2),
        (3, 2, 1),
        (3, 2, 2),
        (3, 1, 2),
        (5, 1, 4),
    ],
)
def test_accumulation_and_processes_give_the_gradient_of_one_batch(
    count: int, batch_size: int, processes: int, ready: Any
) -> None:
    """4 accumulated batches of 1 are one batch of 4, and so are uneven ones with
    fillers.
    """
    whole, wanted = gradient(ready, count, count, 1)
    parts, found = gradient(ready, count, batch_size, processes)
    assert parts == pytest.approx(whole, rel=1e-6)
    for name, one in wanted.items():
        assert bool(one.abs().max() > 1e-3)
        torch.testing.assert_close(one, found[name], rtol=1e-5, atol=1e-7)


ERROR = torch.arange(16.0).view(1, 1, 4, 4)
LEFT = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(3, 1, 4, 4)


def test_a_weighted_loss_is_the_mean_over_what_counts() -> None:
    weight = torch.tensor([1.0, 0.5, 0.0, 0.0]).expand(3, 1, 4, 4)
    square = ERROR.square()
    expected = (square * weight).sum((1, 2, 3)) / weight.sum((1, 2, 3))
    found = loss(off_by(ERROR), loss_weight=weight)
    assert found.tolist() == pytest.approx(expected.tolist())
    one = torch.zeros(3, 1, 4, 4)
    one[:, :, 2, 1] = 1
    assert loss(off_by(3), loss_weight=one).tolist() == pytest.approx([9, 9, 9])


def holding(mask: Tensor) -> Any:
    """What a variant keeps fixed where the mask is 0."""
    return lambda latents, timestep, noise: LatentConstraint(latents, timestep, mask)


def test_of_what_a_variant_holds_nothing_counts_whatever_its_weight() -> None:
    lower = torch.zeros(1, 1, 4, 1)
    lower[:, :, 2:] = 1
    weight = LEFT * torch.tensor([2.0, 1.0, 3.0, 1.0]).view(4, 1)
    counted = weight * lower
    expected = (ERROR.square() * counted).sum((1, 2, 3)) / counted.sum((1, 2, 3))
    given: dict[str, Any] = {"constrain_latents": holding(lower)}
    found = loss(off_by(ERROR), loss_weight=weight, **given)
    assert found.tolist() == pytest.approx(expected.tolist())
    ones = loss(off_by(ERROR), loss_weight=torch.ones(3, 1, 4, 4), **given)
    assert torch.equal(ones, loss(off_by(ERROR), **given))


def test_a_sample_of_which_nothing_counts_has_loss_0_and_gradient_0() -> None:
    """The first: what its weights count, the variant holds. The others are as ever."""
    right = 1 - LEFT
    weight = torch.cat([LEFT[:1], right[1:]])
    error = torch.ones(3, 2, 4, 4, requires_grad=True)
    given: dict[str, Any] = {"constrain_latents": holding(right)}
    found = loss(off_by(error), loss_weight=weight, **given)
    assert found[0] == 0
    assert torch.equal(found[1:], loss(off_by(1), loss_weight=right, **given)[1:])
    found.sum().backward()
    assert error.grad is not None
    assert not error.grad[0].any() and error.grad[1:].any()
    assert error.grad.isfinite().all()
    nothing = loss(off_by(1), loss_weight=torch.zeros(3, 1, 4, 4))
    assert nothing.tolist() == [0, 0, 0]


def test_weights_of_another_size_than_the_latents_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[3, 1, 1, 4\].*\[3, 2, 4, 4\]"):
        loss(off_by(ERROR), loss_weight=torch.ones(3, 1, 1, 4))
