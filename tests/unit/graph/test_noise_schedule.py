"""One record of numbers gives inference its sigmas and training its draws, both in
fp32.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from dstrain import Rng, SampleKey, TimestepSampler, UsageError
from dstrain.graph.noise_schedule import STRATA, StratifiedSampler, TimestepDistribution
from dstrain.plugin import FlowMatchSchedule
from numpy.typing import NDArray

DRAWS = 100_000
FEWER = 20_000
"""Enough to see a distribution within .03."""
SHIFT = 3.0
PLAIN = FlowMatchSchedule(shift=SHIFT)
STRETCHED = FlowMatchSchedule(max_mu=0.9, max_tokens=8192, shift_terminal=0.02)
Numbers = NDArray[np.float64]


def draw(levels: TimestepSampler, count: int = DRAWS) -> torch.Tensor:
    return levels.draw(Rng([SampleKey(0, 0, 0, row) for row in range(count)]))


def unshifted(sigma: Numbers) -> Numbers:
    """The time t whose shifted value 3 t / (1 + 2 t) is sigma."""
    return sigma / (SHIFT - (SHIFT - 1) * sigma)


def normal_below(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def logit_normal_below(sigma: Numbers) -> Numbers:
    times = np.clip(unshifted(sigma), 1e-9, 1 - 1e-9)
    return np.array([normal_below(math.log(t / (1 - t))) for t in times])


def mode_below(sigma: Numbers) -> Numbers:
    """Esser et al. 2024, equation 20: t = 1 - u - s (cos^2(pi u / 2) - 1 + u) for u
    uniform, s = 1.29.
    """
    u = np.linspace(0, 1, 200_001)
    times = np.sort(1 - u - 1.29 * (np.cos(np.pi * u / 2) ** 2 - 1 + u))
    return np.searchsorted(times, unshifted(sigma)) / len(u)


@pytest.mark.parametrize(
    ("sampling", "below"),
    [
        ("shifted", unshifted),
        ("logit_normal", logit_normal_below),
        ("uniform", lambda sigma: sigma),
        ("mode", mode_below),
    ],
)
def test_draws_have_the_wanted_density(
    sampling: str, below: Callable[[Numbers], Numbers]
) -> None:
    """The largest distance between the two distribution functions; chance alone stays
    below .0052 in 99 of 100.
    """
    sigmas = np.sort(draw(TimestepSampler(PLAIN, sampling=sampling)).double().numpy())
    steps = np.arange(1, DRAWS + 1) / DRAWS
    at = np.flatnonzero(
        np.diff(sigmas, append=2.0) > 0
    )  # the table is discrete: compare where a value ends
    assert np.abs(steps[at] - below(sigmas[at])).max() < 0.0055


def test_draws_are_fp32_and_use_the_whole_table() -> None:
    sigmas = draw(TimestepSampler(PLAIN))
    assert sigmas.dtype == torch.float32
    assert len(sigmas.unique()) == 1000
    assert len(sigmas.bfloat16().unique()) < 400
    assert len(draw(TimestepSampler(PLAIN, sampling="uniform")).unique()) > 0.99 * DRAWS


@pytest.mark.parametrize("sampling", ["shifted", "logit_normal", "uniform", "mode"])
@pytest.mark.parametrize(("least", "most"), [(0.0, 0.358), (0.358, 1.0), (0.5, 0.501)])
def test_boundaries_keep_the_draws_between_them(
    sampling: str, least: float, most: float
) -> None:
    levels = TimestepSampler(
        PLAIN, sampling=sampling, min_boundary=least, max_boundary=most
    )
    sigmas = draw(levels, 4_000)
    top, bottom = (
        PLAIN.table[int(least * 1000)],
        PLAIN.table[min(int(most * 1000), 999)],
    )
    assert float(bottom) <= float(sigmas.min())
    assert float(sigmas.max()) <= float(top)
    assert (
        float(sigmas.max() - sigmas.min()) > 0.9 * float(top - bottom)
        or most - least < 0.01
    )


@pytest.mark.parametrize(
    ("least", "most"), [(0.5, 0.5), (0.6, 0.5), (-0.1, 1.0), (0.0, 1.1)]
)
def test_boundaries_that_leave_nothing_are_refused(least: float, most: float) -> None:
    with pytest.raises(UsageError, match=f"got {least} and {most}"):
        TimestepSampler(PLAIN, min_boundary=least, max_boundary=most)


@pytest.mark.parametrize("schedule", [PLAIN, STRETCHED, FlowMatchSchedule()])
@pytest.mark.parametrize("steps", [2, 8, 50])
def test_inference_goes_from_one_to_zero(
    schedule: FlowMatchSchedule, steps: int
) -> None:
    sigmas = schedule.sigmas(steps, tokens=1024)
    assert sigmas.dtype == torch.float32
    assert sigmas.shape == (steps + 1,)
    assert (float(sigmas[0]), float(sigmas[-1])) == (1.0, 0.0)
    assert bool((sigmas.diff() < 0).all())


def test_one_step_of_inference_is_the_whole_way() -> None:
    assert PLAIN.sigmas(1, tokens=64).tolist() == [1.0, 0.0]


def test_the_shifts_are_those_of_the_formulas() -> None:
    assert PLAIN.sigmas(2, tokens=7).tolist() == pytest.approx(
        [1, 3 * 0.5 / (1 + 2 * 0.5), 0]
    )
    exponential = FlowMatchSchedule(
        base_mu=0.5, max_mu=1.15, base_tokens=256, max_tokens=4096
    )
    assert exponential.mu(256) == pytest.approx(0.5)
    assert exponential.mu(4096) == pytest.approx(1.15)
    assert exponential.sigmas(2, tokens=256)[1] == pytest.approx(
        math.exp(0.5) / (math.exp(0.5) + 1)
    )


def test_the_shift_of_a_resolution_is_the_root_of_its_tokens() -> None:
    schedule = FlowMatchSchedule(unshifted_tokens=256)
    sigma = np.linspace(1, 0, 8, dtype=np.float32)
    shift = math.sqrt(1600 / 256)
    wanted = shift * sigma / (1 + (shift - 1) * sigma)
    assert np.allclose(schedule.sigmas(7, 1600).numpy(), wanted, atol=1e-7)
    assert schedule.sigmas(7, 1600)[0] == 1
    # Of several images, one decides.
    assert schedule.tokens((1, 16, 5, 80, 80)) == 1600
    assert FlowMatchSchedule().tokens((1, 16, 5, 80, 80)) == 8000


def test_more_tokens_mean_more_noise_unless_the_shift_is_fixed() -> None:
    assert STRETCHED.sigmas(4, 4096)[1] > STRETCHED.sigmas(4, 256)[1]
    assert torch.equal(PLAIN.sigmas(4, 4096), PLAIN.sigmas(4, 256))


def test_the_last_sigma_is_stretched_to_the_terminal_one() -> None:
    assert float(STRETCHED.sigmas(8, 1024)[-2]) == pytest.approx(0.02, rel=1e-5)
    assert float(STRETCHED.table[-1]) == pytest.approx(0.02, rel=1e-5)


@pytest.mark.parametrize(
    "schedule", [PLAIN, STRETCHED, FlowMatchSchedule(shift=5.0, sigma_min=0.003)]
)
def test_the_training_table_descends_from_one(schedule: FlowMatchSchedule) -> None:
    assert schedule.table.dtype == torch.float32
    assert schedule.table.shape == (1000,)
    assert float(schedule.table[0]) == 1.0
    assert bool((schedule.table.diff() < 0).all())
    assert float(schedule.table[-1]) > 0


def test_a_table_with_a_least_sigma_ends_there() -> None:
    assert float(
        FlowMatchSchedule(shift=1.0, sigma_min=0.003).table[-1]
    ) == pytest.approx(0.003)


def test_weights_have_mean_one_and_are_largest_in_the_middle() -> None:
    levels = TimestepSampler(PLAIN)
    weights = levels.weight(PLAIN.table)
    assert float(weights.mean()) == pytest.approx(1, abs=1e-4)
    assert float(weights.min()) == 0
    assert float(PLAIN.table[weights.argmax()]) == pytest.approx(0.5, abs=2e-3)
    at = torch.tensor([0.5, 0.2])
    least = torch.exp(-2 * (PLAIN.table - 0.5) ** 2).min()
    wanted = (1 - least) / (math.exp(-2 * 0.3**2) - least)
    assert float(levels.weight(at)[0] / levels.weight(at)[1]) == pytest.approx(
        float(wanted), rel=1e-4
    )


def test_without_weighting_every_weight_is_one() -> None:
    assert TimestepSampler(PLAIN, weighting="none").weight(
        PLAIN.table
    ).unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["base_mu", "max_mu"])
def test_a_schedule_has_one_form(name: str) -> None:
    with pytest.raises(UsageError, match="has both shift and base_mu or max_mu"):
        FlowMatchSchedule(shift=3.0, **{name: 0.5})


@pytest.mark.parametrize("sampling", ["shifted", "uniform", "logit_normal", "mode"])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.2, 0.7)])
def test_the_four_parts_of_a_distribution_are_the_distribution_in_order_of_noise(
    sampling: TimestepDistribution, bounds: tuple[float, float]
) -> None:
    levels = TimestepSampler(PLAIN, sampling, "bsmntw", *bounds)
    stratified = levels.stratified()
    assert isinstance(stratified, StratifiedSampler)
    parts = []
    for part in range(STRATA):
        keys = [SampleKey(0, -1, part, row) for row in range(FEWER // STRATA)]
        parts.append(stratified.draw(Rng(keys)))
    for low, high in pairwise(parts):
        assert low.dtype == torch.float32
        assert low.max() <= high.min()
    free = draw(levels, FEWER).sort().values
    drawn = torch.cat(parts).sort().values
    # The two samples have the same quantiles.
    assert (free - drawn).abs().max() < 0.03
    assert torch.equal(stratified.weight(drawn), levels.weight(drawn))
    keys = [SampleKey(0, -1, 1, 5)]
    assert torch.equal(stratified.draw(Rng(keys)), stratified.draw(Rng(keys)))
