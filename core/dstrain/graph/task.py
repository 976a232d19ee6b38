"""Define a task: a loss with what it needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dstrain.graph.function_spec import POSITIVE, FunctionSpec
from dstrain.graph.inputs import Column, Constant, Input

GIVEN_TO_LOSS = ("predict",)


@dataclass(frozen=True)
class Task:
    """A named loss with what it needs; both stages follow from it."""

    name: str
    loss: FunctionSpec
    """A function of `predict`, of values, and after the `*` of components and context; it
    returns (batch,) losses.
    """
    branches: tuple[str, ...] = (POSITIVE,)
    """Branches of classifier-free guidance that the loss asks `predict` for."""
    inputs: Mapping[str, Input] = field(default_factory=dict)
    """Inputs that the loss uses in addition to those of the variant. It gets a list, one
    value per sample, or the value itself if that is the same in the whole batch.
    """
    from_rows: bool = True
    """False if a caller passes the inputs, and not a dataset."""

    @classmethod
    def of(
        cls,
        name: str,
        loss: Callable[..., Any],
        branches: tuple[str, ...] = (POSITIVE,),
        inputs: Mapping[str, Input] | None = None,
    ) -> "Task":
        """Return a task for a loss function; the arguments are the fields."""
        spec = FunctionSpec.of(loss, given=GIVEN_TO_LOSS)
        return cls(name, spec, branches, inputs or {})

    @property
    def listed(self) -> frozenset[str]:
        """Return the inputs of which the loss gets a list, one value per sample."""
        return frozenset(
            name
            for name, source in self.inputs.items()
            if not isinstance(source, Constant)
            and not (isinstance(source, Column) and source.same_in_batch)
        )

    @property
    def runs_sampler(self) -> bool:
        """Return whether the loss goes through all steps of the sampler, and so runs
        every expert.
        """
        return not {"sampler", "inference_sigmas"}.isdisjoint(self.loss.components)
