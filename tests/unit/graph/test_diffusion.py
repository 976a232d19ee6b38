"""Diffusion processes have the numbers of diffusers' schedulers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dstrain import Rng, SampleKey, TimestepSampler, UsageError
from dstrain.lazy import import_name
from dstrain.plugin import FlowMatchSchedule
from dstrain.plugin.noise import Diffusion
from torch import Tensor

from tests.support.family import PIPELINES

LATENTS, NOISE = torch.randn(2, 4, 1, 3, generator=torch.Generator().manual_seed(0))
LEVEL = torch.tensor([0.0, 7.0, 500.0, 998.0])


@pytest.mark.parametrize("zero_terminal_snr", [False, True])
@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "cosine"])
def test_mixtures_and_targets_are_those_of_ddpm(
    betas: Any, zero_terminal_snr: bool
) -> None:
    of_diffusers = import_name("diffusers", "DDPMScheduler")(
        beta_schedule={"cosine": "squaredcos_cap_v2"}.get(betas, betas),
        beta_start=0.00085,
        beta_end=0.012,
        rescale_betas_zero_snr=zero_terminal_snr,
    )
    own = Diffusion("v", betas, zero_terminal_snr=zero_terminal_snr)
    level, timesteps = LEVEL.view(4, 1, 1), LEVEL.long()
    # diffusers multiplies in fp32.
    near = {"rtol": 1e-5, "atol": 3e-5}
    wanted = of_diffusers.add_noise(LATENTS, NOISE, timesteps)
    torch.testing.assert_close(own.mix(LATENTS, NOISE, level), wanted, **near)
    wanted = of_diffusers.get_velocity(LATENTS, NOISE, timesteps)
    torch.testing.assert_close(own.target(LATENTS, NOISE, level), wanted, **near)
    assert torch.equal(own.timestep(own.table).long(), of_diffusers.timesteps)


def of_velocity(snr: Tensor) -> Tensor:
    """With s + n = 1, n is 1 / (1 + s / n)."""
    return snr.clamp(max=5) / (1 + snr.sqrt()) ** 2


@pytest.mark.parametrize(
    ("process", "formula"),
    [
        (Diffusion("epsilon"), lambda snr: snr.clamp(max=5) / snr),
        (Diffusion("v"), lambda snr: snr.clamp(max=5) / (snr + 1)),
        (Diffusion("x_0"), lambda snr: snr.clamp(max=5)),
        (FlowMatchSchedule(shift=1.0), of_velocity),
    ],
)
def test_min_snr_weighs_each_prediction_as_its_error_of_the_data(
    process: Any, formula: Any
) -> None:
    factors = process.factors(process.table.double())
    snr = (factors[0].double() / factors[1].double()).square()
    found = process.weight(process.table, "min_snr")
    torch.testing.assert_close(found.double(), formula(snr), rtol=1e-4, atol=1e-6)
    whole = Diffusion("epsilon", zero_terminal_snr=True)
    assert whole.weight(whole.table, "min_snr").isfinite().all()


def test_each_timestep_is_drawn_as_often_as_another() -> None:
    sampler = TimestepSampler(Diffusion(), "uniform", "none")
    rng = Rng([SampleKey(0, 0, 0, row) for row in range(100_000)])
    counts = sampler.draw(rng).long().bincount(minlength=1000)
    assert len(counts) == 1000
    assert counts.min() > 50 and counts.max() < 150


def test_the_first_part_of_validation_has_the_least_noise() -> None:
    for sampling in ("uniform", "sigmoid", "shifted"):
        whole = TimestepSampler(Diffusion(), sampling, "none").stratified()
        keys = [SampleKey(0, 0, part, row) for part in range(4) for row in range(50)]
        means = whole.draw(Rng(keys)).view(4, 50).mean(1)
        assert bool((means.diff() > 100).all())


def test_names_that_do_not_exist_are_refused_where_they_are_given() -> None:
    wrong: list[dict[str, Any]] = [{"predicts": "eps"}, {"betas": "squared"}]
    for one in wrong:
        with pytest.raises(UsageError, match="is none of"):
            Diffusion(**one)
    for name, value in (("loss_weighting", "min-snr"), ("timestep_sampling", "even")):
        with pytest.raises(UsageError, match=f"training_defaults: .*{value}"):
            replace(PIPELINES["base"], training_defaults={name: value})


def test_a_weighting_of_flow_matching_is_refused() -> None:
    with pytest.raises(UsageError, match="flow matching alone"):
        TimestepSampler(Diffusion(), "uniform", "bsmntw")
