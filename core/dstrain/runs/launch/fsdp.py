"""Translate accelerate's settings of FSDP, version 1 and 2, and of its groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dstrain.distributed import Sharding
from dstrain.errors import UsageError
from dstrain.runs.launch.variables import WHERE, number, switched_on, world_size

FSDP = "ACCELERATE_USE_FSDP"
GROUPS = "ACCELERATE_USE_PARALLELISM_CONFIG"
STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)
"""Version 1's ways to shard a network, in the order of their numbers from 1."""


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


def read_fsdp(environment: Mapping[str, str]) -> Launch:
    """Return what the settings of FSDP say; raises UsageError for what is not supported."""
    if environment.get("FSDP_IGNORED_MODULES", "None") not in ("", "None"):
        raise UsageError(WHERE, "fsdp_ignored_modules is not supported; leave it out")
    flags = {}
    for setting, flag in (
        ("ACTIVATION_CHECKPOINTING", "use_gradient_checkpointing"),
        ("ACTIVATION_CHECKPOINTING_OFFLOAD", "use_gradient_checkpointing_offload"),
    ):
        if switched_on(environment, f"FSDP_{setting}"):
            flags[flag] = "true"
    version = environment.get("FSDP_VERSION", "1")
    if version == "2":
        mode = _group_mode(environment)
        reshards = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
        if reshards not in ("true", "false"):
            what = f"fsdp_reshard_after_forward is {reshards}; it can be true or false"
            raise UsageError(WHERE, what)
        reshard = reshards == "true"
        name = "FSDP 2"
    elif version == "1":
        strategy = _strategy(environment)
        name = f"FSDP 1 with {strategy}"
        mode = "hybrid" if strategy.startswith("HYBRID") else "full"
        if strategy == "NO_SHARD":
            mode = "none"
        reshard = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    else:
        raise UsageError(WHERE, f"fsdp_version is {version}; it can be 1 or 2")
    offload = switched_on(environment, "FSDP_OFFLOAD_PARAMS")
    return Launch(*sharding_of(name, mode, reshard, offload), flags)


def sharding_of(
    name: str, mode: str, reshard: bool, offload: bool
) -> tuple[Sharding | None, str]:
    """Return how networks are sharded, and that in one line.

    Args:
        name: What the settings call it.
        mode: none, full or hybrid.
        reshard: Whether a block's weights are given up after its forward pass.
        offload: Whether what is sharded lies in RAM.
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


def refuse_groups(environment: Mapping[str, str]) -> None:
    """Raise UsageError for groups of processes that share more than weights: tensors,
    contexts or sequences.
    """
    for setting in ("tp", "cp", "sp"):
        name = f"parallelism_config_{setting}_size"
        size = environment.get(name.upper(), "1")
        if number(size) != 1:
            what = f"{name} is {size}; only groups of dp_replicate and dp_shard are supported"
            raise UsageError(WHERE, what)


def _group_mode(environment: Mapping[str, str]) -> str:
    """Return none, full or hybrid, as the sizes of groups say."""
    if not switched_on(environment, GROUPS):
        return "full"
    sizes = {}
    for setting in ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE"):
        text = environment.get(f"PARALLELISM_CONFIG_{setting}", "1")
        size = number(text)
        if not size >= 1:
            what = f"parallelism_config_{setting.lower()} is {text}; it has to be a number from 1"
            raise UsageError(WHERE, what)
        sizes[setting] = int(size)
    if sizes["DP_SHARD_SIZE"] == 1:
        return "none"
    if sizes["DP_REPLICATE_SIZE"] == 1:
        return "full"
    of_a_machine = environment.get("LOCAL_WORLD_SIZE", str(world_size(environment)))
    if number(of_a_machine) != sizes["DP_SHARD_SIZE"]:
        size = sizes["DP_SHARD_SIZE"]
        what = f"parallelism_config_dp_shard_size is {size}, but a machine has {of_a_machine} processes"
        raise UsageError(WHERE, what, "each machine can have one copy of the networks")
    return "hybrid"


def _strategy(environment: Mapping[str, str]) -> str:
    """Return version 1's way to shard networks by its name."""
    text = environment.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    # Newer files of version 1 have it here; the launcher then hands on the other
    # variable with its default.
    reshards = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
    if text == "FULL_SHARD" and reshards not in ("TRUE", "FALSE", "NONE"):
        text = reshards
    numbered = {str(number): name for number, name in enumerate(STRATEGIES, 1)}
    strategy = numbered.get(text, text)
    if strategy not in STRATEGIES:
        what = f"fsdp_sharding_strategy is {text}; it can be {', '.join(STRATEGIES)}"
        raise UsageError(WHERE, what)
    return strategy
