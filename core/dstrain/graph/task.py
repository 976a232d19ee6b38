"""A task: a loss, the sides of guidance it needs, and inputs of its own. Both stages
follow from it by construction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dstrain.errors import UsageError
from dstrain.graph.inputs import Column, Constant, Input
from dstrain.graph.unit import FunctionSpec

GIVEN_TO_LOSS = ("predict",)


@dataclass(frozen=True)
class Task:
    """A named loss with what it needs.

    loss: a function of `predict`, the values it reads, and after the `*` what it
    borrows; returns (batch,) losses. sides: the halves of classifier-free guidance
    whose conditions the loss asks `predict` for. inputs: what the loss reads of a row
    beside the variant's own inputs. It is given a list of them, one per sample, or the
    value itself of a `Setting` and of a column whose values are `alike` in a batch.
    from_rows: whether the variant's inputs come from a data set; otherwise a caller
    gives them.
    """

    name: str
    loss: FunctionSpec
    branches: tuple[str, ...] = ("positive",)
    inputs: Mapping[str, Input] = field(default_factory=lambda: MappingProxyType({}))
    from_rows: bool = True

    @classmethod
    def of(
        cls,
        name: str,
        loss: Callable[..., Any],
        branches: tuple[str, ...] = ("positive",),
        inputs: Mapping[str, Input] | None = None,
    ) -> "Task":
        """Build the record of a task from its loss function."""
        return cls(
            name,
            FunctionSpec.of(loss, given=GIVEN_TO_LOSS),
            branches,
            MappingProxyType(dict(inputs or {})),
        )

    @property
    def listed(self) -> frozenset[str]:
        """Inputs of which the loss is given a list, one per sample."""
        sources = self.inputs.items()
        same_in_batch = {
            n
            for n, s in sources
            if isinstance(s, Constant) or (isinstance(s, Column) and s.same_in_batch)
        }
        return frozenset(self.inputs) - same_in_batch

    @property
    def runs_sampler(self) -> bool:
        """Whether the loss runs the whole sampler, so that every part of a denoiser in
        several parts is used.
        """
        return "sampler" in self.loss.components

    def with_task_inputs(
        self, inputs: Mapping[str, Input], owner: str
    ) -> dict[str, Input]:
        """The variant's table of inputs with the task's own; raises UsageError for a
        name that both declare.
        """
        for name, source in self.inputs.items():
            if inputs.get(name, source) != source:
                raise UsageError(
                    f"task {self.name}",
                    f"its input {name!r} is also one of {owner}; rename one of them",
                )
        return {**inputs, **self.inputs}
