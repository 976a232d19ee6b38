"""Tests of a variant's noise process, of its samplers and of its guidance."""

from inspect import signature

import torch
from torch import Tensor

from dstrain.graph.noise_process import NoiseProcess, constrain_nothing
from dstrain.pipeline.sampler import integrate, samplers_of
from dstrain.testing.contract import Contract
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.fingerprints import unit_values
from dstrain.testing.rows import inputs, usual_size
from dstrain.testing.trained_sets import trained_sets

STEPS = 8
LEAST = 0.15
"""What is left of the data at the noisiest level is below this, and so is the noise at the
least noisy one.
"""
NEAR = 0.05
"""How far a sampler that is told the truth may end from it, for data of about 1: it asks
at timesteps between those of the table.
"""
NOISIEST = 2.0
"""The greatest standard deviation of what a sampler leaves of the noise, which has 1."""


def factors(process: NoiseProcess, level: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is left of data and how much noise there is, as the process mixes them."""
    one, none = torch.ones_like(level), torch.zeros_like(level)
    return process.mix(one, none, level), process.mix(none, one, level)


class Noisy(Contract):
    """Loss, samplers and guidance of a variant agree about noise."""

    def test_levels_go_from_noise_to_data(self, tested: FamilyUnderTest) -> None:
        """And so do the timesteps that the denoiser is told."""
        process = tested.spec.schedule
        of_data, of_noise = factors(process, process.table)
        assert of_data[0] < LEAST and of_noise[-1] < LEAST
        for descending in (-of_data, of_noise, process.timestep(process.table)):
            assert bool((descending.diff() <= 0).all())

    def test_a_sampler_that_is_told_what_training_teaches_ends_at_the_data(
        self, tested: FamilyUnderTest
    ) -> None:
        """A denoiser that has learned its target without error leads each sampler there."""
        process = tested.spec.schedule
        draw = torch.Generator().manual_seed(0)
        data, noise = torch.randn(2, 1, 4, 8, 8, generator=draw)
        timesteps = process.timestep(process.table)

        def learned(latents: Tensor, timestep: Tensor) -> Tensor:
            nearest = (timesteps - timestep.flatten()[0]).abs().argmin()
            level = process.table[nearest]
            of_data, of_noise = factors(process, level)
            left = (latents - of_data * data) / of_noise
            # A sampler may come back at its last step from anywhere.
            assert float(left.std()) < NOISIEST, "it leaves the path from noise to data"
            return process.target(data, left, level)

        for name, make in samplers_of(tested.spec).items():
            end = integrate(
                process, constrain_nothing, learned, noise, STEPS, make=make
            )
            difference = float((end.latents - data).abs().max())
            assert difference < NEAR, f"{name} ends {difference:.3f} from the data"

    def test_a_limited_weight_is_that_of_an_error_of_the_data(
        self, tested: FamilyUnderTest
    ) -> None:
        """min_snr weighs the error of the data that follows from one of a prediction
        (Hang et al. 2023), whatever is predicted.
        """
        process, gamma = tested.spec.schedule, 5.0
        level = process.table[50::100]
        of_data, of_noise = factors(process, level)
        by_prediction = {
            "velocity": of_noise / (of_data + of_noise),
            "epsilon": of_noise / of_data,
            "v": of_noise,
            "x_0": torch.ones_like(of_data),
        }
        limited = (of_data / of_noise).square().clamp(max=gamma)
        wanted = limited * by_prediction[process.predicts].square()
        weight = process.weight(level, "min_snr", gamma)
        torch.testing.assert_close(weight, wanted, rtol=1e-4, atol=1e-6)

    def test_guidance_that_is_off_changes_nothing(
        self, tested: FamilyUnderTest
    ) -> None:
        """At the scale `no_guidance`, the prediction is that of the prompt."""
        spec = tested.spec
        units = unit_values(tested.pipeline, inputs(spec, usual_size(spec)))
        (shape,) = {
            made["input_latents"].shape
            for made in units.values()
            if "input_latents" in made
        }
        draw = torch.Generator().manual_seed(0)
        positive, negative = torch.randn(2, *shape, generator=draw)
        apply = spec.apply_guidance
        takes_timestep = "timestep" in signature(apply).parameters
        given = {"timestep": torch.full((1,), 500.0)} if takes_timestep else {}
        guided = apply(positive, negative, spec.no_guidance, **given)
        torch.testing.assert_close(guided, positive, rtol=1e-5, atol=1e-5)

    def test_the_objective_of_a_run_is_the_variants_own(
        self, tested: FamilyUnderTest
    ) -> None:
        """What is left out is recorded as what it stands for, so that a resume compares
        it.
        """
        trained, *_ = trained_sets(tested.family, tested.spec)
        recorded = tested.setup(trained).recorded
        wanted = tested.spec.defaults_of_training
        assert {name: getattr(recorded, name) for name in wanted} == wanted
