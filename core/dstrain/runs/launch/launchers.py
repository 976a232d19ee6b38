"""Read what launchers say from environment variables, and refuse what contradicts a run's
flags: `accelerate launch` hands its configuration file on by these.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import get_args

from dstrain.config.options import Precision, TrainConfig
from dstrain.errors import UsageError
from dstrain.runs.launch.deepspeed import DEEPSPEED, read_deepspeed
from dstrain.runs.launch.fsdp import FSDP, GROUPS, read_fsdp
from dstrain.runs.launch.variables import WHERE, Launch, number, switched_on

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
