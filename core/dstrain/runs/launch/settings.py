"""Read what launchers say from environment variables, and refuse what contradicts a run's
flags: `accelerate launch` hands its configuration file on by these.

DeepSpeed itself is not run: its ZeRO stages become sharding. It would own the backward pass,
the clipping, the accumulation and the precision, by which a run's numbers are those of any
other number of processes and can be resumed; and its checkpoints are pickles.
"""

import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from dstrain.config.options import Precision, TrainConfig
from dstrain.distributed import Sharding
from dstrain.errors import UsageError
from dstrain.storage import read_limited

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


DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
PREFIX = "ACCELERATE_DEEPSPEED_"
MOST_BYTES = 1 << 20
READ = frozenset(
    {
        "zero_optimization", "fp16", "bf16", "gradient_accumulation_steps",
        "gradient_clipping", "train_micro_batch_size_per_gpu", "train_batch_size",
    }
)  # fmt: skip
"""Entries of DeepSpeed's file that are acted on."""
SPEED = frozenset(
    {
        "aio", "comms_logger", "dump_state", "flops_profiler", "memory_breakdown",
        "prescale_gradients", "steps_per_print", "wall_clock_breakdown",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    }
)  # fmt: skip
"""Entries of DeepSpeed's file about how it works and what it prints, which change no
number and have no counterpart. All others would change what a run does."""
ZERO_READ = frozenset({"stage", "offload_optimizer", "offload_param", "cpu_offload"})
"""Entries of its zero_optimization that are acted on; the others are about buckets,
memory and exchange."""
UNSET = ("auto", "none", None)


def read_deepspeed(environment: Mapping[str, str]) -> Launch:
    """Return what the settings of DeepSpeed say; raises UsageError for what is not
    supported, and for a file that cannot be read.
    """
    path = environment.get(f"{PREFIX}CONFIG_FILE", "none")
    content = {} if path == "none" else _read(Path(path))
    where = WHERE if path == "none" else path
    zero = _section(content, "zero_optimization", where)
    # The default is that of accelerate.
    stage = environment.get(f"{PREFIX}ZERO_STAGE", "2")
    if content:
        stage = zero.get("stage", 0)
    if number(stage) not in (0, 1, 2, 3):
        raise UsageError(where, f"ZeRO stage is {stage}; it can be 0, 1, 2 or 3")
    # Its older name.
    offload = zero.get("cpu_offload") is True
    for part in ("optimizer", "param"):
        device = _section(zero, f"offload_{part}", where).get("device", "none")
        if not content:
            device = environment.get(f"{PREFIX}OFFLOAD_{part.upper()}_DEVICE", "none")
        if device not in (*UNSET, "cpu"):
            what = f"offload_{part}_device is {device}; it can be none or cpu"
            raise UsageError(where, what)
        offload |= device == "cpu"
    ignored = _not_read(content, READ)
    for entry in ignored:
        if entry not in SPEED:
            what = f"{entry} of DeepSpeed is not supported"
            raise UsageError(where, what, "leave it out; dstrain's own options do that")
    ignored += _not_read(zero, ZERO_READ)
    flags = _flags(content, where)
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if clipping not in UNSET:
        flags.setdefault("max_grad_norm", clipping)
    total = content.get("train_batch_size")
    if total not in UNSET and not number(total) >= 1:
        raise UsageError(where, f"train_batch_size is {total!r}; it has to be a number")
    # Stages 1 and 2 keep parameters whole, which is what not giving them up after the
    # forward pass comes nearest to.
    mode = "full" if number(stage) else "none"
    name = f"ZeRO stage {int(number(stage))}"
    sharding, said = sharding_of(name, mode, number(stage) == 3, offload)
    if ignored:
        said += f"; without effect here: {', '.join(ignored)}"
    size = None if total in UNSET else int(number(total))
    return Launch(sharding, said, flags, size)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of DeepSpeed's own file."""
    try:
        content = json.loads(read_limited(path, MOST_BYTES))
    except (OSError, ValueError) as error:
        raise UsageError(
            path, f"cannot be read as DeepSpeed's JSON: {error}"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(path, "is not a JSON object")
    return content


def _section(content: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    section = content.get(name) or {}
    if not isinstance(section, dict):
        raise UsageError(where, f"{name} has to be an object")
    return section


def _flags(content: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the flags that DeepSpeed's file has values for."""
    flags = {}
    for entry, flag in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "max_grad_norm"),
        ("train_micro_batch_size_per_gpu", "batch_size"),
    ):
        value = content.get(entry)
        if value not in UNSET:
            flags[flag] = str(value)
    if _section(content, "fp16", where).get("enabled", False) is True:
        raise UsageError(where, "fp16 is not supported; use bf16 (--mixed_precision)")
    if _section(content, "bf16", where).get("enabled", "auto") is True:
        flags["mixed_precision"] = "bf16"
    return flags


def _not_read(section: Mapping[str, Any], read: Set[str]) -> list[str]:
    """Return the entries that are not read and would do something."""
    return [
        entry
        for entry, value in section.items()
        if entry not in read
        and value
        and value not in UNSET
        and not (isinstance(value, dict) and value.get("enabled") is False)
    ]


SILENT = MappingProxyType(
    {"mixed_precision": ("no",), "gradient_accumulation_steps": ("1", "auto")}
)
"""Settings -> values that `accelerate launch` also hands on when its user said nothing."""


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return what the launcher says in these environment variables.

    Raises UsageError for settings that dstrain does not have.
    """
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in get_args(Precision):
        raise UsageError(WHERE, f"mixed_precision is {precision}; it can be no or bf16")
    _refuse_others(environment)
    flags = {}
    for name, silent in SILENT.items():
        value = environment.get(f"ACCELERATE_{name.upper()}", silent[0])
        if value not in silent:
            flags[name] = value
    found = Launch()
    if switched_on(environment, DEEPSPEED):
        found = read_deepspeed(environment)
    elif switched_on(environment, FSDP):
        found = read_fsdp(environment)
    return replace(found, flags={**flags, **found.flags})


def in_stage(launch: Launch, stage: str, processes: int) -> Launch:
    """Return what the launcher says about a stage of a run: stage 1 trains nothing, and
    one process has nothing to shard.

    Raises UsageError for one process that would keep in RAM what is sharded.
    """
    if launch.sharding is None:
        return launch
    if stage == "data_process":
        return replace(launch, sharding=None, said="")
    if processes > 1:
        return launch
    if launch.sharding.offload:
        what = "one process shards nothing, so that nothing can be offloaded"
        advice = "start several processes, or choose a configuration without offload"
        raise UsageError(WHERE, what, advice)
    said = f"{WHERE}: one process has everything, so that nothing is sharded"
    return replace(launch, sharding=None, said=said)


def check_launch(config: TrainConfig, launch: Launch, processes: int) -> None:
    """Refuse flags that contradict the launcher; raises UsageError naming both.

    processes: How many the launcher started.
    """
    for name, configured in launch.flags.items():
        value = getattr(config, name)
        if name == "mixed_precision" and value is None:
            continue  # the launcher's is used
        if name == "use_gradient_checkpointing":
            value = bool(value)
        if not _same(value, configured):
            what = f"is {value}, but {WHERE} says {configured}; change one of them"
            raise UsageError(f"--{name}", what)
    samples = processes * config.batch_size * config.gradient_accumulation_steps
    total = launch.total_batch_size
    if total not in (None, samples):
        what = f"a step has {samples} samples, but {WHERE} says {total}"
        advice = "a step has --batch_size x --gradient_accumulation_steps x processes"
        raise UsageError("--batch_size", what, advice)


def _same(value: object, configured: str) -> bool:
    if isinstance(value, bool) or value is None:
        return str(value).lower() == configured.lower()
    if isinstance(value, int | float):
        return float(value) == number(configured)
    return str(value) == configured


def _refuse_others(environment: Mapping[str, str]) -> None:
    """Raise UsageError for what accelerate can do and dstrain cannot."""
    for name in ("MEGATRON_LM", "SAGEMAKER"):
        if switched_on(environment, f"ACCELERATE_USE_{name}"):
            what = (
                f"{name} is not supported; MULTI_GPU, MULTI_CPU, FSDP and DEEPSPEED are"
            )
            raise UsageError(WHERE, what)
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        what = f"dynamo_backend {backend} is not supported; leave dynamo_config out"
        raise UsageError(WHERE, what)
    if not switched_on(environment, GROUPS):
        return
    # Groups that share more than weights: tensors, contexts or sequences.
    for setting in ("tp", "cp", "sp"):
        name = f"parallelism_config_{setting}_size"
        size = environment.get(name.upper(), "1")
        if number(size) != 1:
            what = f"{name} is {size}; only groups of dp_replicate and dp_shard are supported"
            raise UsageError(WHERE, what)
