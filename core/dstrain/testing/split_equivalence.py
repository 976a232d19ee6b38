"""Compare unsplit and split training of one set of trainables: losses and gradients,
bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dstrain.graph import serialize
from dstrain.runs import Setup, data_process
from dstrain.testing.family_under_test import FamilyUnderTest, Run, processes
from dstrain.testing.trained_sets import TrainedSet

BATCHES = (1, 2)


@dataclass(frozen=True)
class Outcome:
    """The losses, gradients by parameter, and cached values by row of one run."""

    run: Run
    losses: Mapping[str, Tensor]
    gradients: Mapping[str, Mapping[str, Tensor | None]]
    values: Mapping[int, Mapping[str, Any]]


def run_unsplit_and_split(
    tested: FamilyUnderTest, trained: TrainedSet
) -> tuple[Outcome, Outcome]:
    """Run unsplit, then fill the cache and run from it."""
    unsplit = outcome(tested.run(tested.setup(trained)))
    return unsplit, outcome(tested.run(stored(tested, trained)))


def stored(tested: FamilyUnderTest, trained: TrainedSet, **flags: Any) -> Setup:
    """Fill the cache for a set of trainables, unless it is filled, and return stage 2's
    setup.
    """
    data_process(tested.setup(trained, task="sft:data_process"), processes())
    return tested.setup(trained, task="sft:train", **flags)


def outcome(run: Run) -> Outcome:
    """Return losses and gradients of batches of one and two rows of each group, without
    an update between them.
    """
    losses: dict[str, Tensor] = {}
    gradients: dict[str, Mapping[str, Tensor | None]] = {}
    values: dict[int, Mapping[str, Any]] = {}
    for size in BATCHES:
        for keys in run.batches(size):
            run.module.zero_grad(set_to_none=True)
            loss = run.losses(keys)
            torch.autograd.backward(loss.sum())
            rows = f"rows {', '.join(str(key.row) for key in keys)}"
            losses[rows] = loss.detach()
            gradients[rows] = {
                name: parameter.grad
                for name, parameter in run.module.trained.parameters.items()
            }
            values |= {key.row: run.cached_values(key.row) for key in keys}
    return Outcome(run, losses, gradients, values)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Return the names of the values, losses and gradients that differ by a bit between
    two runs.
    """
    found = [
        f"value {name} of row {row}"
        for row, values in one.values.items()
        for name in values.keys() | other.values[row].keys()
        if not same_value(values.get(name), other.values[row].get(name))
    ]
    found += [
        f"loss of {batch}"
        for batch, loss in one.losses.items()
        if not torch.equal(loss, other.losses[batch])
    ]
    for batch, gradients in one.gradients.items():
        names = gradients.keys() | other.gradients[batch].keys()
        same = (
            name
            for name in names
            if same_tensor(gradients.get(name), other.gradients[batch].get(name))
        )
        found += [f"gradient of {name}, {batch}" for name in sorted(names - set(same))]
    return found


def without_gradient(found: Outcome) -> list[str]:
    """Return the trained parameters to which no batch gives a gradient that is not
    zero.
    """
    names = next(iter(found.gradients.values()))
    given = {
        name
        for table in found.gradients.values()
        for name, value in table.items()
        if value is not None and value.any()
    }
    return [name for name in names if name not in given]


def same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors are equal bit for bit; None equals None alone."""
    return (
        one is other
        if one is None or other is None
        else one.dtype == other.dtype and torch.equal(one, other)
    )


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values that units exchange are equal bit for bit."""
    serialized: list[tuple[Any, dict[str, Tensor]]] = []
    for value in (one, other):
        tensors: dict[str, Tensor] = {}
        serialized.append((serialize(value, tensors, "value"), tensors))
    (form, tensors), (other_form, others) = serialized
    return bool(form == other_form) and all(
        same_tensor(tensors[name], others[name]) for name in tensors
    )
