"""Read what launchers say in environment variables."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dstrain.distributed import Sharding
from dstrain.errors import UsageError

WHERE = "accelerate's configuration"
"""Where a setting is that an error is about."""
TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})


def switched_on(environment: Mapping[str, str], variable: str) -> bool:
    """Return whether a variable is set to one of the words that mean yes."""
    return environment.get(variable, "").strip().lower() in TRUE


def number(text: object) -> float:
    """Return a number that is written as text; NaN, which equals none, for anything else."""
    try:
        return float(str(text))
    except ValueError:
        return math.nan


def machine_size(environment: Mapping[str, str]) -> int:
    """Return how many of the processes run on this machine; all where it is not said."""
    size = number(environment.get("LOCAL_WORLD_SIZE", ""))
    return int(size) if size >= 1 else world_size(environment)


def world_size(environment: Mapping[str, str]) -> int:
    """Return how many processes the launcher started: torchrun's and accelerate's
    variable, or that of MPI; 1 without a launcher.
    """
    names = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    for variable in names:
        size = number(environment.get(variable, ""))
        if size >= 1:
            return int(size)
    return 1


@dataclass(frozen=True)
class Launch:
    """What a launcher says about a run."""

    sharding: Sharding | None = None
    """How networks are sharded among the processes; None for a copy in each."""
    said: str = ""
    """One line: what the launcher's settings became; '' where they say nothing."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flag -> the value that the launcher's settings have for it."""
    total_batch_size: int | None = None
    """Samples in a step, over all processes, if the settings state it."""


def sharding_of(
    name: str, mode: str, reshard: bool, offload: bool
) -> tuple[Sharding | None, str]:
    """Return how networks are sharded, and that in one line.

    Args:
        mode: none, full or hybrid.
        reshard: Whether a block's weights are given up after its forward pass.
    """
    if mode == "none":
        if offload:
            what = f"{name} shards nothing, so that nothing can be offloaded"
            raise UsageError(WHERE, what, "choose a way that shards networks")
        return None, f"{name} of {WHERE}: every process has a copy of the networks"
    kind: Literal["full", "hybrid"] = "hybrid" if mode == "hybrid" else "full"
    among = "the processes of a machine" if kind == "hybrid" else "all processes"
    parts = [f"parameters, gradients and optimizer state are sharded among {among}"]
    if not reshard:
        parts.append("a block's parameters stay together between forward and backward")
    if offload:
        parts.append("what is sharded lies in RAM")
    done = "" if name == "FSDP 2" else " is done as FSDP 2"
    said = f"{name} of {WHERE}{done}: {'; '.join(parts)}"
    return Sharding(kind, reshard, offload), said
