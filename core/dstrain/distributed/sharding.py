"""How trained networks are divided among the processes of a run."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Sharding:
    """Each process keeps some rows of every weight, of its gradient and of its
    optimizer state; a block's weights are whole while it computes.
    """

    mode: Literal["full", "hybrid"] = "full"
    """full: over all processes. hybrid: over those of a machine, and every machine has
    all rows."""
    reshard_after_forward: bool = True
    """Whether a block's weights are given up between its forward and backward pass.
    Without it they are gathered once, and gradients and optimizer state alone are
    divided for the rest of the step."""
    offload: bool = False
    """Whether rows, gradients and optimizer state lie in RAM."""

    def __str__(self) -> str:
        """Return it in words."""
        words = {
            "full": "divided over all processes",
            "hybrid": "divided over the processes of each machine",
        }[self.mode]
        if not self.reshard_after_forward:
            words += ", weights whole from the first forward pass of a step on"
        return f"{words}, in RAM" if self.offload else words
