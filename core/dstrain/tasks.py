"""A task: a loss and the sides of guidance it needs. Both stages follow from it by construction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dstrain.unit import Signature

GIVEN_TO_LOSS = ("predict",)


@dataclass(frozen=True)
class Task:
    """A named loss with what it needs.

    loss: a function of `predict`, the values it reads, and after the `*` what it borrows; returns (batch,) losses.
    sides: the halves of classifier-free guidance whose conditions the loss asks `predict` for.
    """

    name: str
    loss: Signature
    sides: tuple[str, ...] = ("positive",)

    @classmethod
    def of(cls, name: str, loss: Callable[..., Any], sides: tuple[str, ...] = ("positive",)) -> "Task":
        """Build the record of a task from its loss function."""
        return cls(name, Signature.of(loss, given=GIVEN_TO_LOSS), sides)
