"""One record of numbers gives inference its sigmas and training its draws, in fp32."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from dstrain import Rng, SampleKey, TimestepSampler, UsageError
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


def logistic_below(times: Numbers, mean: float = 0.0, std: float = 1.0) -> Numbers:
    """Of the logistic function of a normal number: Esser et al. 2024, equation 19."""
    inside = np.clip(times, 1e-9, 1 - 1e-9)
    return np.array(
        [normal_below((math.log(t / (1 - t)) - mean) / std) for t in inside]
    )


def logit_normal_below(sigma: Numbers, **normal: float) -> Numbers:
    return logistic_below(unshifted(sigma), **normal)


def sigmoid_below(sigma: Numbers, **normal: float) -> Numbers:
    """The range of the table is divided, whose last sigma is not 0."""
    least = float(PLAIN.table[-1])
    return logistic_below((sigma - least) / (1 - least), **normal)


def mode_below(sigma: Numbers) -> Numbers:
    """Esser et al. 2024, equation 20, s = 1.29: t = 1 - u - s (cos^2(pi u / 2) - 1 + u)."""
    u = np.linspace(0, 1, 200_001)
    times = np.sort(1 - u - 1.29 * (np.cos(np.pi * u / 2) ** 2 - 1 + u))
    return np.searchsorted(times, unshifted(sigma)) / len(u)


@pytest.mark.parametrize(
    ("sampling", "normal", "below", "values"),
    [
        ("shifted", {}, unshifted, 1000),
        ("logit_normal", {}, logit_normal_below, 900),
        ("logit_normal", {"mean": 1.0, "std": 0.5}, logit_normal_below, 600),
        ("uniform", {}, lambda sigma: sigma, 0.99 * DRAWS),
        ("mode", {}, mode_below, 900),
        ("sigmoid", {}, sigmoid_below, 0.99 * DRAWS),
        ("sigmoid", {"mean": -0.7, "std": 2.0}, sigmoid_below, 0.9 * DRAWS),
    ],
)
def test_draws_have_the_wanted_density(
    sampling: str,
    normal: dict[str, float],
    below: Callable[..., Numbers],
    values: float,
) -> None:
    """The largest distance of the two functions is by chance below .0052 in 99 of 100."""
    drawn = draw(TimestepSampler(PLAIN, sampling=sampling, **normal))
    assert drawn.dtype == torch.float32
    assert len(drawn.unique()) >= values
    sigmas = np.sort(drawn.double().numpy())
    steps = np.arange(1, DRAWS + 1) / DRAWS
    # The table is discrete: compare where a value ends.
    at = np.flatnonzero(np.diff(sigmas, append=2.0) > 0)
    assert np.abs(steps[at] - below(sigmas[at], **normal)).max() < 0.0055


@pytest.mark.parametrize("std", [1.0, 9.0])
@pytest.mark.parametrize(
    "sampling", ["shifted", "logit_normal", "uniform", "mode", "sigmoid"]
)
@pytest.mark.parametrize(("least", "most"), [(0.0, 0.358), (0.358, 1.0), (0.5, 0.501)])
def test_boundaries_keep_the_draws_between_them(
    sampling: str, least: float, most: float, std: float
) -> None:
    levels = TimestepSampler(PLAIN, sampling, "none", least, most, std=std)
    sigmas = draw(levels, 4_000)
    top = PLAIN.table[int(least * 1000)]
    bottom = PLAIN.table[int(most * 1000) - 1]
    assert bottom <= sigmas.min()
    assert sigmas.max() <= top
    if most - least > 0.01:
        assert sigmas.max() - sigmas.min() > 0.9 * (top - bottom)


@pytest.mark.parametrize(
    ("least", "most"), [(0.5, 0.5), (0.6, 0.5), (-0.1, 1.0), (0.0, 1.1)]
)
def test_boundaries_that_leave_nothing_are_refused(least: float, most: float) -> None:
    with pytest.raises(UsageError, match=f"{least} and {most}"):
        TimestepSampler(PLAIN, min_boundary=least, max_boundary=most)


def test_the_shifts_are_those_of_the_formulas() -> None:
    middle = 3 * 0.5 / (1 + 2 * 0.5)
    assert PLAIN.sigmas(2, tokens=7).tolist() == pytest.approx([1, middle, 0])
    assert torch.equal(PLAIN.sigmas(4, 4096), PLAIN.sigmas(4, 256))
    exponential = FlowMatchSchedule()
    assert exponential.mu(256) == pytest.approx(0.5)
    assert exponential.mu(4096) == pytest.approx(1.15)
    middle = math.exp(0.5) / (math.exp(0.5) + 1)
    assert exponential.sigmas(2, tokens=256)[1] == pytest.approx(middle)
    even = FlowMatchSchedule(shift=1.0)
    shifted = STRETCHED.shifted(SHIFT)
    assert torch.equal(shifted.table, PLAIN.table)
    assert shifted.max_tokens == STRETCHED.max_tokens
    assert [even.boundary_fraction(at) for at in (1000, 875, 0)] == [0.001, 0.126, 1]


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


def test_the_last_sigma_is_stretched_to_the_terminal_one() -> None:
    assert float(STRETCHED.sigmas(8, 1024)[-2]) == pytest.approx(0.02, rel=1e-5)
    assert float(STRETCHED.table[-1]) == pytest.approx(0.02, rel=1e-5)


def test_weights_have_mean_one_and_are_largest_in_the_middle() -> None:
    levels = TimestepSampler(PLAIN)
    weights = levels.weight(PLAIN.table)
    assert float(weights.mean()) == pytest.approx(1, abs=1e-4)
    assert float(weights.min()) == 0
    assert float(PLAIN.table[weights.argmax()]) == pytest.approx(0.5, abs=2e-3)
    least = torch.exp(-2 * (PLAIN.table - 0.5) ** 2).min()
    wanted = (1 - least) / (math.exp(-2 * 0.3**2) - least)
    middle, low = levels.weight(torch.tensor([0.5, 0.2])).tolist()
    assert middle / low == pytest.approx(float(wanted), rel=1e-4)
    even = TimestepSampler(PLAIN, weighting="none").weight(PLAIN.table)
    assert even.unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["base_mu", "max_mu"])
def test_a_schedule_has_one_form(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        FlowMatchSchedule(shift=3.0, **{name: 0.5})


@pytest.mark.parametrize("sampling", ["shifted", "uniform", "logit_normal", "mode"])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.2, 0.7)])
def test_the_four_parts_of_a_distribution_are_the_distribution_in_order_of_noise(
    sampling: str, bounds: tuple[float, float]
) -> None:
    levels = TimestepSampler(PLAIN, sampling, "bsmntw", *bounds)
    stratified = levels.stratified()
    parts = []
    for part in range(4):
        keys = [SampleKey(0, -1, part, row) for row in range(FEWER // 4)]
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
