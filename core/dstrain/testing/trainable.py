"""Tests of training: split equivalence, gradients, batches, precision."""

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from dstrain.graph.plan import Plan
from dstrain.runs.precompute import data_process
from dstrain.testing.contract import Contract, UnsplitAndSplit
from dstrain.testing.family_under_test import (
    FamilyUnderTest,
    gradients_enabled,
    processes,
)
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
            anywhere = f"{component}.{pattern.replace('{last}', '*')}"
            assert any(fnmatchcase(name, anywhere) for name in names), (
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


def opened_in(plans: Iterable[Plan], stage: str) -> frozenset[str]:
    """Return the components of which a stage reads weights or configuration."""
    return frozenset(
        name
        for plan in plans
        for name in (*plan.components[stage], *plan.configs[stage])
    )
