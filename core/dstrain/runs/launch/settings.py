"""Read what the launcher of a run says, and refuse what contradicts its flags.

`accelerate launch` reads its configuration file and hands it on by environment
variables, so that these are all there is to read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import get_args

from dstrain.config.options import Precision, TrainConfig
from dstrain.distributed import Sharding
from dstrain.errors import UsageError
from dstrain.runs.launch.deepspeed import DEEPSPEED, read_deepspeed
from dstrain.runs.launch.fsdp import FSDP, GROUPS, read_fsdp, refuse_groups
from dstrain.runs.launch.variables import WHERE, number, switched_on

SILENT = MappingProxyType(
    {"mixed_precision": ("no",), "gradient_accumulation_steps": ("1", "auto")}
)
"""Settings -> values that `accelerate launch` also hands on when its user said nothing."""


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


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return what the launcher says in these environment variables.

    Raises UsageError for settings that dstrain does not have.
    """
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in get_args(Precision):
        raise UsageError(
            WHERE, f"mixed precision {precision} is not supported; use no or bf16"
        )
    _refuse_others(environment)
    flags = {}
    for name, silent in SILENT.items():
        value = environment.get(f"ACCELERATE_{name.upper()}", silent[0])
        if value not in silent:
            flags[name] = value
    if switched_on(environment, DEEPSPEED):
        found = read_deepspeed(environment)
        return Launch(
            found.sharding, found.said, {**flags, **found.flags}, found.total_batch_size
        )
    if switched_on(environment, FSDP):
        sharding, said, activation = read_fsdp(environment)
        return Launch(sharding, said, flags | activation)
    return Launch(flags=flags)


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
        raise UsageError(
            WHERE,
            "one process shards nothing, so that nothing of what is trained can be offloaded",
            "start several processes; or choose a configuration without offload, and give "
            "--enable_model_cpu_offload, which keeps frozen weights in RAM",
        )
    said = f"{WHERE}: one process has everything, so that nothing is sharded"
    return replace(launch, sharding=None, said=said)


def check_launch(config: TrainConfig, launch: Launch, processes: int) -> None:
    """Refuse flags that contradict the launcher; raises UsageError naming both.

    Args:
        config: The flags.
        launch: What the launcher says.
        processes: How many it started.
    """
    for name, configured in launch.flags.items():
        value = getattr(config, name)
        if name == "mixed_precision" and value is None:
            continue  # the launcher's is used
        if name == "use_gradient_checkpointing":
            value = bool(value)
        if not _same(value, configured):
            raise UsageError(
                f"--{name}",
                f"is {value}, but accelerate's configuration says {configured}; change one of them",
            )
    samples = processes * config.batch_size * config.gradient_accumulation_steps
    if launch.total_batch_size not in (None, samples):
        raise UsageError(
            "--batch_size",
            f"a step has {samples} samples, but train_batch_size of accelerate's configuration is "
            f"{launch.total_batch_size}; change one of them",
            "a step has --batch_size x --gradient_accumulation_steps x processes",
        )


def _same(value: object, configured: str) -> bool:
    if isinstance(value, bool) or value is None:
        return str(value).lower() == configured.lower()
    if isinstance(value, int | float):
        return float(value) == number(configured)
    return str(value) == configured


def _refuse_others(environment: Mapping[str, str]) -> None:
    """Raise UsageError for what accelerate can do and dstrain cannot."""
    supported = "supported are copies (MULTI_GPU, MULTI_CPU), FSDP, and ZeRO stages 0 to 3 of DeepSpeed"
    for variable, name in (
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_SAGEMAKER", "SageMaker's own distributed training"),
    ):
        if switched_on(environment, variable):
            raise UsageError(WHERE, f"{name} is not supported", supported)
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise UsageError(
            WHERE,
            f"dynamo_backend {backend} is not supported",
            "leave dynamo_config out of the configuration, and give --compile",
        )
    if switched_on(environment, GROUPS):
        refuse_groups(environment)
