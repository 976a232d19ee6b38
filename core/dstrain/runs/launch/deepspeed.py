"""Translate accelerate's settings of DeepSpeed: its ZeRO stages become sharding.

DeepSpeed itself is not run. It would own the backward pass, the clipping, the
accumulation and the precision, by which a run's numbers are those of any other number of
processes and can be resumed; and its checkpoints are pickles.
"""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.distributed import Sharding
from dstrain.errors import UsageError
from dstrain.runs.launch.fsdp import sharding_of
from dstrain.runs.launch.variables import WHERE, number
from dstrain.storage import read_limited

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
number and have no counterpart."""
ZERO_READ = frozenset({"stage", "offload_optimizer", "offload_param", "cpu_offload"})
"""Entries of its zero_optimization that are acted on."""
ZERO_SPEED = frozenset(
    {
        "allgather_bucket_size", "allgather_partitions", "contiguous_gradients",
        "cpu_offload_use_pin_memory", "elastic_checkpoint", "ignore_unused_parameters",
        "legacy_stage1", "load_from_fp32_weights", "memory_efficient_linear",
        "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size", "use_multi_rank_bucket_allreduce",
    }
)  # fmt: skip
"""Entries of its zero_optimization about buckets, memory and saving, likewise."""
OWN_SPEED = MappingProxyType(
    {
        "ZERO3_INIT": "zero3_init_flag",
        "ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
        "MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    }
)
"""Variables of accelerate's own settings without a counterpart -> their names."""
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "communication_data_type": "fp32",
        "gradient_predivide_factor": 1,
        "mics_shard_size": -1,
        "zero_hpz_partition_size": 1,
    }
)
"""Entries that would change what a run does -> the value with which they do not."""
UNSET = ("auto", "none", None)


@dataclass(frozen=True)
class DeepSpeed:
    """What settings of DeepSpeed say about a run."""

    sharding: Sharding | None
    said: str
    flags: Mapping[str, str]
    """Flag -> the value that the settings have for it."""
    total_batch_size: int | None


def read_deepspeed(environment: Mapping[str, str]) -> DeepSpeed:
    """Return what the settings of DeepSpeed say; raises UsageError for what is not
    supported, and for a file that cannot be read.
    """
    path = environment.get(f"{PREFIX}CONFIG_FILE", "none")
    content = {} if path == "none" else _read(Path(path))
    where = WHERE if path == "none" else path
    zero = _section(content, "zero_optimization", where)
    if content:
        stage = zero.get("stage", 0)
    else:
        # What accelerate itself takes, where nothing is said.
        stage = environment.get(f"{PREFIX}ZERO_STAGE", "2")
    if number(stage) not in (0, 1, 2, 3):
        raise UsageError(
            where, f"ZeRO stage {stage} is not supported; it can be 0, 1, 2 or 3"
        )
    offload = False
    for part in ("optimizer", "param"):
        own = _section(zero, f"offload_{part}", where)
        device = own.get("device", "none")
        if not content:
            device = environment.get(f"{PREFIX}OFFLOAD_{part.upper()}_DEVICE", "none")
        if device not in (*UNSET, "cpu"):
            raise UsageError(
                where,
                f"offload to {device} (offload_{part}_device) is not supported; it can be none or cpu",
            )
        offload |= device == "cpu"
    # Its older name.
    offload |= zero.get("cpu_offload") is True
    ignored = _without_effect(content, READ, SPEED, where)
    ignored += _without_effect(zero, ZERO_READ, ZERO_SPEED, where)
    for variable, setting in OWN_SPEED.items():
        if environment.get(f"{PREFIX}{variable}", "false") not in ("false", "None"):
            ignored.append(setting)
    flags = _flags(content, where)
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if clipping not in UNSET:
        flags.setdefault("max_grad_norm", clipping)
    total = content.get("train_batch_size")
    if total not in UNSET and not number(total) >= 1:
        raise UsageError(where, f"train_batch_size is {total!r}; it has to be a number")
    name = f"ZeRO stage {int(number(stage))}"
    if number(stage) == 0:
        sharding, said = sharding_of(name, "none", False, offload)
    else:
        # Stages 1 and 2 keep parameters whole, which is what not giving them up after
        # the forward pass comes nearest to.
        sharding, said = sharding_of(name, "full", number(stage) == 3, offload)
    if ignored:
        said += f"; without effect here: {', '.join(ignored)}"
    return DeepSpeed(
        sharding, said, flags, None if total in UNSET else int(number(total))
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the content of DeepSpeed's own file."""
    try:
        content = json.loads(read_limited(path, MOST_BYTES))
    except (OSError, ValueError) as error:
        raise UsageError(
            path,
            "cannot be read as DeepSpeed's JSON (deepspeed_config_file of accelerate's configuration)",
            "its path is relative to the folder that the run is started in",
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


def _without_effect(
    section: Mapping[str, Any], read: Set[str], speed: Set[str], where: str
) -> list[str]:
    """Return the entries that have no counterpart; raises UsageError for one that would
    change what a run does.

    Args:
        section: Entries.
        read: Those that are acted on.
        speed: Those that change no number.
        where: The file.
    """
    advice = {
        "optimizer": "give --learning_rate, --weight_decay and the other flags of the optimizer",
        "scheduler": "give --lr_scheduler and --lr_warmup_steps",
        "activation_checkpointing": "give --use_gradient_checkpointing",
        "tensorboard": "give --report_to tensorboard",
        "wandb": "give --report_to wandb",
    }
    ignored = []
    for entry, value in section.items():
        enabled = not (isinstance(value, dict) and value.get("enabled") is False)
        if entry in read or not value or value in UNSET or not enabled:
            continue
        if entry in speed or DEFAULTS.get(entry) == value:
            ignored.append(entry)
            continue
        raise UsageError(
            where,
            f"{entry} of DeepSpeed is not supported; leave it out",
            *([advice[entry]] if entry in advice else []),
        )
    return ignored
