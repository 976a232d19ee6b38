"""Unsplit and split runs are compared bit for bit, and what differs is named."""

from dataclasses import replace

import torch
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.split_equivalence import (
    differences,
    run_unsplit_and_split,
    same_tensor,
    same_value,
    without_gradient,
)
from dstrain.testing.trained_sets import TrainedSet


def test_what_differs_by_a_bit_is_named(fine: FamilyUnderTest) -> None:
    unsplit, split = run_unsplit_and_split(fine, TrainedSet(("dit",)))
    assert differences(unsplit, split) == []
    assert without_gradient(unsplit) == []
    batch, loss = next(iter(split.losses.items()))
    nudged = replace(split, losses={**split.losses, batch: loss.nextafter(loss + 1)})
    assert differences(unsplit, nudged) == [f"loss of {batch}"]
    gradients = dict(split.gradients[batch])
    name = next(iter(gradients))
    gradients[name] = None
    missing = replace(split, gradients={**split.gradients, batch: gradients})
    assert differences(unsplit, missing) == [f"gradient of {name}, {batch}"]
    row, values = next(iter(split.values.items()))
    key = next(key for key, one in values.items() if isinstance(one, torch.Tensor))
    changed = replace(
        split, values={**split.values, row: {**values, key: values[key] + 1}}
    )
    assert differences(unsplit, changed) == [f"value {key} of row {row}"]


def test_a_parameter_without_any_gradient_is_named(fine: FamilyUnderTest) -> None:
    unsplit, _ = run_unsplit_and_split(fine, TrainedSet(lora="dit"))
    name = next(iter(next(iter(unsplit.gradients.values()))))
    cleared = {
        batch: {**gradients, name: torch.zeros(1)}
        for batch, gradients in unsplit.gradients.items()
    }
    assert without_gradient(replace(unsplit, gradients=cleared)) == [name]


def test_values_are_equal_in_dtype_shape_and_bits() -> None:
    one = torch.tensor([1.0, 2.0])
    assert same_tensor(one, one.clone())
    assert not same_tensor(one, one.double())
    assert not same_tensor(one, None)
    assert same_tensor(None, None)
    assert same_value([one, "a"], [one.clone(), "a"])
    assert not same_value([one, "a"], [one.clone(), "b"])
    assert not same_value({"x": one}, {"x": one + 1})
