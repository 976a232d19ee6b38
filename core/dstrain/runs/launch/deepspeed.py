"""Read accelerate's settings of DeepSpeed and its own file.

DeepSpeed itself is not run: its ZeRO stages become sharding. It would own the backward pass,
the clipping, the accumulation and the precision, by which a run's numbers are those of any
other number of processes and can be resumed; and its checkpoints are pickles.
"""

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from dstrain.errors import UsageError
from dstrain.runs.launch.variables import WHERE, Launch, number, sharding_of
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
