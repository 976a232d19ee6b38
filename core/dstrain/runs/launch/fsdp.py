"""Read accelerate's settings of FSDP, which become sharding."""

from collections.abc import Mapping

from dstrain.errors import UsageError
from dstrain.runs.launch.variables import (
    WHERE,
    Launch,
    number,
    sharding_of,
    switched_on,
    world_size,
)

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
