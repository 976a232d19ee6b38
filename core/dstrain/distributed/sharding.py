"""How trained networks are sharded among the processes of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dstrain.errors import UsageError


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
    sharded for the rest of the step."""
    offload: bool = False
    """Whether rows, gradients and optimizer state lie in RAM."""

    def processes(self, started: int, on_a_machine: int) -> int:
        """Return how many of the started processes shard a network; raises UsageError
        for machines with different numbers of processes.
        """
        if self.mode == "full":
            return started
        if started % on_a_machine:
            what = f"{started} processes do not make machines of {on_a_machine} each"
            raise UsageError(
                "hybrid sharding", what, "start equally many on each machine"
            )
        return on_a_machine

    def advice(self) -> Iterator[str]:
        """Yield what to change in the launcher's configuration to need less memory."""
        yield "or start more processes, each of which then has fewer rows"
        if not self.reshard_after_forward:
            yield "or set fsdp_reshard_after_forward: true (DeepSpeed: zero_stage: 3)"
        if not self.offload:
            yield "or set fsdp_offload_params: true (DeepSpeed: offload_param_device: cpu)"

    def __str__(self) -> str:
        """Return it in words."""
        words = {
            "full": "sharded over all processes",
            "hybrid": "sharded over the processes of each machine",
        }[self.mode]
        if not self.reshard_after_forward:
            words += ", weights whole from the first forward pass of a step on"
        return f"{words}, in RAM" if self.offload else words
