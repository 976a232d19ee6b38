"""Translate accelerate's settings of DeepSpeed: its ZeRO stages become sharding.

DeepSpeed itself is not run. It would own the backward pass, the clipping, the
accumulation and the precision, by which a run's numbers are those of any other number of
processes and can be resumed; and its checkpoints are pickles.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.distributed.sharding import Sharding
from dstrain.errors import UsageError
from dstrain.runs.launch.fsdp import sharding_of
from dstrain.runs.launch.variables import WHERE, number
from dstrain.storage.files import read_limited

DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
PREFIX = "ACCELERATE_DEEPSPEED_"
MOST_BYTES = 1 << 20
SPEED = frozenset(
    {
        "comms_logger", "communication_data_type", "dump_state", "memory_breakdown",
        "prescale_gradients", "steps_per_print", "wall_clock_breakdown",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    }
)  # fmt: skip
"""Entries of DeepSpeed's file about how it works and what it prints, which change no
number and have no counterpart."""
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
    _refuse_entries(content, where)
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


def _refuse_entries(content: Mapping[str, Any], where: str) -> None:
    """Raise UsageError for entries that would change what a run does."""
    advice = {
        "optimizer": "give --learning_rate, --weight_decay and the other flags of the optimizer",
        "scheduler": "give --lr_scheduler and --lr_warmup_steps",
        "activation_checkpointing": "give --use_gradient_checkpointing",
    }
    read = {
        "zero_optimization", "fp16", "bf16", "gradient_accumulation_steps",
        "gradient_clipping", "train_micro_batch_size_per_gpu", "train_batch_size",
    }  # fmt: skip
    for entry, value in content.items():
        enabled = not (isinstance(value, dict) and value.get("enabled") is False)
        if entry in read or entry in SPEED or not value or not enabled:
            continue
        raise UsageError(
            where,
            f"{entry} of DeepSpeed is not supported; leave it out",
            *([advice[entry]] if entry in advice else []),
        )
