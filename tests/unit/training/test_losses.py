"""Losses are per sample, in fp32, and their gradient does not depend on how a global
batch is cut up.
"""

from itertools import islice
from typing import Any, TypedDict

import pytest
import torch
from dstrain import (
    SFT,
    Batch,
    Pipeline,
    Rng,
    Sample,
    SampleKey,
    TimestepSampler,
    Trainables,
    TrainingModule,
    UsageError,
    flow_match,
)
from dstrain.plugin import (
    Column,
    FlowMatchSchedule,
    LatentConstraint,
    ModelFamily,
    PipelineSpec,
    Unit,
)
from dstrain.training import Order, split_across_ranks
from dstrain.training.losses import mean_square
from torch import Tensor, nn

SCHEDULE = FlowMatchSchedule(shift=3.0)
KEYS = [SampleKey(0, 0, 0, row) for row in range(3)]
LATENTS = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))


def hold_nothing(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
    return LatentConstraint(latents, timestep)


def loss(
    predict: Any,
    latents: Tensor = LATENTS,
    constrain_latents: Any = hold_nothing,
    loss_weight: Tensor | None = None,
    **timestep_sampler: Any,
) -> Tensor:
    keys = KEYS[: len(latents)]
    return flow_match(
        predict,
        latents,
        loss_weight,
        timestep_sampler=TimestepSampler(SCHEDULE, **timestep_sampler),
        constrain_latents=constrain_latents,
        rng=Rng(keys),
    )


def drawn(**timestep_sampler: Any) -> tuple[Tensor, Tensor]:
    """The sigmas and noises of the three samples."""
    rng = Rng(KEYS)
    return TimestepSampler(SCHEDULE, **timestep_sampler).draw(rng), rng.normal(
        "noise", LATENTS.shape[1:]
    )


def test_the_right_prediction_costs_nothing_and_another_its_square() -> None:
    _, noise = drawn()
    assert loss(lambda noisy_latents, timestep: noise - LATENTS).tolist() == [0, 0, 0]
    assert loss(
        lambda noisy_latents, timestep: noise - LATENTS + 2, weighting="none"
    ).tolist() == pytest.approx([4, 4, 4])


def test_the_denoiser_sees_the_mixture_and_an_fp32_timestep_per_sample() -> None:
    sigma, noise = drawn()

    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        level = sigma.view(-1, 1, 1, 1)
        assert torch.equal(noisy_latents, (1 - level) * LATENTS + level * noise)
        assert timestep.dtype == torch.float32
        assert torch.equal(timestep, sigma * 1000)
        return noisy_latents

    assert loss(predict).shape == (3,)


def test_samples_are_weighed_by_their_own_sigma() -> None:
    sigma, _ = drawn()
    plain, weighed = (
        loss(lambda noisy_latents, timestep: noisy_latents * 0, weighting=name)
        for name in ("none", "bsmntw")
    )
    assert torch.allclose(weighed, plain * TimestepSampler(SCHEDULE).weight(sigma))


def test_a_batch_has_the_losses_of_its_samples() -> None:
    whole = loss(lambda noisy_latents, timestep: noisy_latents)
    assert torch.equal(
        whole[:1], loss(lambda noisy_latents, timestep: noisy_latents, LATENTS[:1])
    )


def test_a_bf16_prediction_is_compared_in_fp32() -> None:
    _, noise = drawn()
    half = (noise - LATENTS).bfloat16()
    losses = loss(lambda noisy_latents, timestep: half, weighting="none")
    assert losses.dtype == torch.float32
    assert torch.allclose(
        losses, (half.float() - (noise - LATENTS)).square().flatten(1).mean(1)
    )


def test_constrained_latents_are_seen_and_what_is_masked_costs_nothing() -> None:
    _, noise = drawn()
    mask = torch.zeros(3, 1, 4, 4)
    mask[:, :, 0] = 1

    def constrain_latents(
        latents: Tensor, timestep: Tensor, noise: Tensor
    ) -> LatentConstraint:
        return LatentConstraint(latents * 0 + 7, timestep * 0, mask)

    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        assert noisy_latents.unique().tolist() == [7]
        assert timestep.tolist() == [0, 0, 0]
        return noise - LATENTS + 3 * mask + 100 * (1 - mask)

    assert loss(
        predict, constrain_latents=constrain_latents, weighting="none"
    ).tolist() == pytest.approx([9, 9, 9])


# The gradient of a global batch, however it is cut into micro-batches and dealt to
# processes.


class Made(TypedDict):
    input_latents: Tensor
    clue: Tensor


def encode(number: int) -> Made: ...  # never called: the samples hold what it makes


def predict(
    noisy_latents: Tensor, timestep: Tensor, clue: Tensor, *, dit: Any
) -> Tensor:
    return dit(noisy_latents + clue + timestep[:, None] / 1000)


def shape() -> tuple[int, ...]:
    return (1, 3)


WIRING = PipelineSpec(
    family="toy",
    variant="base",
    components=("dit",),
    units=(Unit(encode),),
    model_fn=predict,
    decoders=(),
    inputs={"number": Column("number", "integer")},
    schedule=SCHEDULE,
    latent_shape=shape,
    apply_guidance=lambda positive, negative, scale: positive,
)
RECORD = ModelFamily("toy", "", "", "", ("base",), "dit", {}, {})


def gradient(count: int, batch_size: int, processes: int) -> tuple[float, list[Tensor]]:
    """The loss and the gradient of one optimizer step over `count` samples, summed over
    processes.
    """
    torch.manual_seed(0)
    dit = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    module = TrainingModule(Pipeline(WIRING, RECORD, {"dit": dit}), SFT, stage="train")
    module.switch_to_training_mode(Trainables(("dit",)))
    numbers = torch.randn(count, 2, 1, 3, generator=torch.Generator().manual_seed(1))
    samples = [
        Sample({"input_latents": own[0], "clue": own[1]}, frozenset({"number"}))
        for own in numbers
    ]
    (keys,) = islice(
        Order(
            (0,) * count, 1, count, 0, [(row, 0) for row in range(count)]
        ).global_batches(0),
        1,
    )
    total = 0.0
    for rank in range(processes):
        for micro in split_across_ranks(keys, batch_size, rank, processes):
            part = module(Batch(micro, [samples[key.row] for key in micro.keys]))
            part.backward()
            total += float(part.detach())
    return total, [
        parameter.grad
        for parameter in module.trained_parameters
        if parameter.grad is not None
    ]


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
    count: int, batch_size: int, processes: int
) -> None:
    """4 accumulated batches of 1 are one batch of 4, and so are uneven ones with
    fillers.
    """
    whole, wanted = gradient(count, count, 1)
    parts, have = gradient(count, batch_size, processes)
    assert len(wanted) == 4
    assert parts == pytest.approx(whole, rel=1e-6)
    for one, other in zip(wanted, have, strict=True):
        assert bool(one.abs().max() > 1e-3)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


# Masks


def off_by(error: Tensor) -> Any:
    """A prediction with this error."""
    _, noise = drawn()
    return lambda noisy_latents, timestep: noise - LATENTS + error


ERROR = torch.arange(16.0).view(1, 1, 4, 4)
LEFT = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(3, 1, 4, 4)


def test_a_weighted_loss_is_the_mean_over_what_counts() -> None:
    weight = torch.tensor([1.0, 0.5, 0.0, 0.0]).expand(3, 1, 4, 4)
    square = ERROR.square()
    expected = ((square * weight).sum((1, 2, 3)) / weight.sum((1, 2, 3))).tolist()
    found = loss(off_by(ERROR), loss_weight=weight, weighting="none")
    assert found.tolist() == pytest.approx(expected)


def test_a_small_mask_does_not_make_a_small_loss() -> None:
    one = torch.zeros(3, 1, 4, 4)
    one[:, :, 2, 1] = 1
    found = loss(off_by(torch.tensor(3.0)), loss_weight=one, weighting="none")
    assert found.tolist() == pytest.approx([9, 9, 9])


def test_what_has_no_weight_has_no_gradient() -> None:
    error = torch.ones(3, 2, 4, 4, requires_grad=True)
    loss(off_by(error), loss_weight=LEFT, weighting="none").sum().backward()
    assert error.grad is not None
    assert error.grad[..., :2].all() and not error.grad[..., 2:].any()
    # As large as if these were all latents: 2 x error / (2 channels x 8 positions).
    assert error.grad[..., :2].flatten().tolist() == pytest.approx([2 / 16] * 48)


@pytest.mark.parametrize("value", [1.0, 0.3])
def test_equal_weights_change_no_bit(value: float) -> None:
    def predict(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        return noisy_latents

    weight = torch.full((3, 1, 4, 4), value)
    weighted = loss(predict, loss_weight=weight)
    assert torch.equal(weighted, loss(predict)) or value != 1
    torch.testing.assert_close(weighted, loss(predict))


def test_of_what_a_variant_holds_nothing_counts_whatever_its_weight() -> None:
    lower = torch.zeros(1, 1, 4, 1)
    lower[:, :, 2:] = 1

    def constrain_latents(
        latents: Tensor, timestep: Tensor, noise: Tensor
    ) -> LatentConstraint:
        return LatentConstraint(latents, timestep, lower)

    given: dict[str, Any] = {
        "constrain_latents": constrain_latents,
        "weighting": "none",
    }
    weight = LEFT * torch.tensor([2.0, 1.0, 3.0, 1.0]).view(4, 1)
    counted = weight * lower
    square = ERROR.square()
    expected = (square * counted).sum((1, 2, 3)) / counted.sum((1, 2, 3))
    found = loss(off_by(ERROR), loss_weight=weight, **given)
    assert found.tolist() == pytest.approx(expected.tolist())
    ones = loss(off_by(ERROR), loss_weight=torch.ones(3, 1, 4, 4), **given)
    assert torch.equal(ones, loss(off_by(ERROR), **given))


def test_a_sample_of_which_nothing_counts_has_loss_0_and_gradient_0() -> None:
    """The first: what its weights count, the variant holds. The others are as ever."""
    right = 1 - LEFT
    weight = torch.cat([LEFT[:1], right[1:]])
    error = torch.ones(3, 2, 4, 4, requires_grad=True)
    found = mean_square(error, right, weight)
    assert found[0] == 0
    assert torch.equal(found[1:], mean_square(error, right, right)[1:])
    found.sum().backward()
    assert error.grad is not None
    assert not error.grad[0].any() and error.grad[1:].any()
    assert error.grad.isfinite().all()
    assert mean_square(error, None, torch.zeros(3, 1, 4, 4)).tolist() == [0, 0, 0]


def test_weights_of_another_size_than_the_latents_are_refused() -> None:
    with pytest.raises(UsageError, match="latent_shape of the variant"):
        loss(off_by(ERROR), loss_weight=torch.ones(3, 1, 1, 4))
