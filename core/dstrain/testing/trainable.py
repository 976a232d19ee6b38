"""Tests of training: split equivalence, gradients, batches, precision."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dstrain.graph import Column, Plan
from dstrain.runs import data_process
from dstrain.testing.compare import EXACT, greatest_difference, position
from dstrain.testing.contract import Contract, PublishedLatents, UnsplitAndSplit
from dstrain.testing.family_under_test import (
    FamilyUnderTest,
    gradients_enabled,
    processes,
)
from dstrain.testing.fingerprints import unit_values
from dstrain.testing.rows import inputs
from dstrain.testing.split_equivalence import differences, without_gradient
from dstrain.testing.trained_sets import TrainedSet, trained_sets


class Trainable(Contract):
    """A family trains as the library promises."""

    def test_split_equals_unsplit_bit_for_bit(
        self,
        tested: FamilyUnderTest,
        trained: TrainedSet,
        unsplit_and_split: UnsplitAndSplit,
    ) -> None:
        """The loss and every gradient are equal, at batches of one and two."""
        unsplit, split = unsplit_and_split(tested, trained)
        assert differences(unsplit, split) == []

    def test_each_stage_needs_no_file_of_the_other(
        self, tested: FamilyUnderTest, trained: TrainedSet, tmp_path: Path
    ) -> None:
        """Each stage runs where the files that only the other one opens are missing."""
        store = tmp_path / "store"
        setup = tested.setup(trained, task="sft:data_process", feature_cache=store)
        plans = [setup.plan(frozenset(cells)) for cells in setup.dataset.rows]
        first = tested.alone(opened_in(plans, "data_process"), tmp_path / "first")
        data_process(replace(setup, models=first), processes())
        second = tested.alone(opened_in(plans, "train"), tmp_path / "second")
        run = tested.run(
            tested.setup(trained, second, task="sft:train", feature_cache=store)
        )
        assert all(run.losses(keys).isfinite().all() for keys in run.batches(1))

    def test_every_trained_parameter_gets_a_gradient(
        self,
        tested: FamilyUnderTest,
        trained: TrainedSet,
        unsplit_and_split: UnsplitAndSplit,
    ) -> None:
        """A parameter without one would be decayed and stop DDP; list it in the spec's
        `unused_parameters`.
        """
        unsplit, _ = unsplit_and_split(tested, trained)
        assert without_gradient(unsplit) == []

    def test_only_what_is_trained_is_in_training_mode(
        self,
        tested: FamilyUnderTest,
        trained: TrainedSet,
        unsplit_and_split: UnsplitAndSplit,
    ) -> None:
        """Dropout acts only in what is trained."""
        for way in unsplit_and_split(tested, trained):
            in_training = {
                name
                for name, network in way.run.module.pipeline.components.items()
                if isinstance(network, nn.Module) and network.training
            }
            assert in_training == set(trained.components)

    def test_unused_parameters_are_those_no_loss_reaches(
        self,
        tested: FamilyUnderTest,
        component: str,
        unsplit_and_split: UnsplitAndSplit,
    ) -> None:
        """The patterns match exactly these parameters, and each matches one."""
        _, split = unsplit_and_split(tested, TrainedSet((component,)))
        network = split.run.module.pipeline.components[component]
        with gradients_enabled(network):
            reached = {f"{component}.{name}" for name in split.run.reached(network)}
        names = {f"{component}.{name}" for name, _ in network.named_parameters()}
        assert names - reached == set(split.run.module.trained.unused_parameters)
        for pattern in tested.spec.unused_parameters.get(component, ()):
            # A toy may be too small to have the blocks that the published model numbers,
            # and have tied weights where another model's are apart.
            anywhere = re.sub("{last}|[0-9]+", "*", pattern)
            assert any(fnmatchcase(name, anywhere) for name in network.state_dict()), (
                f"{pattern} names no parameter"
            )

    def test_a_sample_has_the_loss_that_it_has_alone(
        self, tested: FamilyUnderTest, unsplit_and_split: UnsplitAndSplit
    ) -> None:
        """Padding in a batch changes nothing."""
        _, split = unsplit_and_split(
            tested, trained_sets(tested.family, tested.spec)[0]
        )
        for keys in split.run.batches(2):
            together = split.run.losses(keys)
            alone = torch.cat([split.run.losses([key]) for key in keys])
            assert torch.allclose(together, alone, rtol=1e-5)

    def test_training_latents_equal_the_published_ones(
        self, tested: FamilyUnderTest, latents_reference: PublishedLatents | None
    ) -> None:
        """What training learns is encoded as the published pipeline does, which
        inference from noise does not show. Latents differ by at most 1e-5.
        """
        assert latents_reference is not None, (
            "the family has `published` and no `published_latents`"
        )
        given = inputs(tested.spec)
        with torch.no_grad():
            theirs = latents_reference(tested.pipeline, tested.model, given)
        for unit in tested.values.values():
            if "input_latents" in unit:
                ours = unit["input_latents"]
        difference, where = greatest_difference(ours, theirs)
        assert difference <= EXACT, f"training latents differ {where}"

    def test_the_loss_leaves_out_what_is_held(self, tested: FamilyUnderTest) -> None:
        """The mask is 0 where `constrain_latents` replaces the noisy latents, and only
        there, with and without the optional inputs.
        """
        everything = inputs(tested.spec)
        optional = {
            name
            for name, source in tested.spec.inputs.items()
            if isinstance(source, Column) and source.optional
        }
        for absent in dict.fromkeys((frozenset[str](), frozenset(optional))):
            given = {
                name: value for name, value in everything.items() if name not in absent
            }
            values = dict(given)
            for made in unit_values(tested.pipeline, given).values():
                values |= made
            assert_mask_fits(tested, values)

    def test_bf16_is_near_fp32(
        self, tested: FamilyUnderTest, unsplit_and_split: UnsplitAndSplit
    ) -> None:
        """Units, model_fn and loss run in the precision of a GPU."""
        trained = trained_sets(tested.family, tested.spec)[0]
        exact, _ = unsplit_and_split(tested, trained)
        rounded = tested.run(tested.setup(trained, mixed_precision="bf16"))
        one, other = (
            torch.cat([run.losses(keys) for keys in run.batches(1)])
            for run in (exact.run, rounded)
        )
        assert torch.allclose(one, other, rtol=0.1)
        assert not torch.equal(one, other)


def assert_mask_fits(tested: FamilyUnderTest, values: Mapping[str, Any]) -> None:
    """Assert that the loss counts exactly the positions that noisy latents reach."""
    constrain = tested.pipeline.constrain_latents(values)
    noise = torch.zeros_like(values["input_latents"])
    timestep = torch.full((1,), 500.0)
    one = constrain(torch.full_like(noise, 2.0), timestep, noise)
    other = constrain(torch.full_like(noise, 3.0), timestep, noise)
    held = one.latents == other.latents
    mask = torch.ones_like(noise) if one.mask is None else one.mask.expand_as(noise)
    wrong = ((mask != 0) == held).flatten().nonzero().flatten()
    if len(wrong):
        index = int(wrong[0])
        state = "held" if held.flatten()[index] else "not held"
        counted = mask.flatten()[index].item()
        raise AssertionError(
            f"{len(wrong)} of {noise.numel()} positions: at {position(noise, index)} "
            f"latents are {state}, and the mask of the loss is {counted:g}"
        )


def opened_in(plans: Iterable[Plan], stage: str) -> frozenset[str]:
    """Return the components of which a stage reads weights or configuration."""
    return frozenset(
        name
        for plan in plans
        for name in (*plan.components[stage], *plan.configs[stage])
    )
