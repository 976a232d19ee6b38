"""Let the processes of a run meet."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    InitProcessGroupKwargs,
)

from dstrain.distributed import Sharding
from dstrain.errors import UsageError
from dstrain.runs.launch.deepspeed import DEEPSPEED
from dstrain.runs.launch.fsdp import FSDP, GROUPS
from dstrain.runs.launch.variables import world_size

TRANSLATED = (
    DEEPSPEED,
    FSDP,
    GROUPS,
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
)
"""Variables by which accelerate and transformers would act themselves."""
OWN = "the script's own Accelerator"
COLLECTIVE_LIMIT = timedelta(minutes=30)
"""How long a process waits for others in a collective, with every backend."""


@contextmanager
def without_accelerates_own() -> Iterator[None]:
    """Inside, accelerate and transformers see none of the settings that dstrain acts on
    in its own way; afterwards they are as before, for another run in this process.
    """
    hidden = {name: os.environ.pop(name) for name in TRANSLATED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def meet(
    environment: Mapping[str, str],
    sharding: Sharding | None,
    find_unused_parameters: bool,
    accumulation_steps: int,
) -> Accelerator:
    """Let the processes that the launcher started meet; one that a script has made
    already is used.

    Raises UsageError where they do not meet, and for an Accelerator whose settings
    dstrain would have to act on.
    """
    _refuse_own_settings(accumulation_steps)
    started = world_size(environment)
    # A process that finds no other device would take itself for the only one.
    alone_on_cpus = started > 1 and not torch.accelerator.is_available()
    # Rows that lie in RAM are exchanged there.
    on_both = sharding is not None and sharding.offload and torch.cuda.is_available()
    backend = {"backend": "cuda:nccl,cpu:gloo"} if on_both and started > 1 else {}
    accelerator = Accelerator(
        # Autocast is dstrain's own.
        mixed_precision="no",
        cpu=alone_on_cpus,
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                find_unused_parameters=find_unused_parameters
            ),
            InitProcessGroupKwargs(timeout=COLLECTIVE_LIMIT, **backend),
        ],
    )
    met = int(accelerator.num_processes)
    if met != started and started > 1:
        what = f"{started} were started, but this one met {met - 1} others"
        raise UsageError(
            "processes", what, "a script makes no Accelerator before run()"
        )
    if met > 1 and accelerator.device.type not in ("cuda", "cpu"):
        what = f"several on devices of kind {accelerator.device.type} are not supported"
        raise UsageError("processes", what, "start one")
    return accelerator


def _refuse_own_settings(accumulation_steps: int) -> None:
    """Raise UsageError for settings of an Accelerator that a script has made before."""
    # Not its constructor, which compares what it is given with what is there.
    state = AcceleratorState._shared_state
    kind = state.get("distributed_type")
    if kind in (
        DistributedType.DEEPSPEED,
        DistributedType.FSDP,
        DistributedType.MEGATRON_LM,
    ):
        what = f"has a plugin for {kind.value}, which dstrain does not use"
        advice = (
            "leave it out, and give the settings by accelerate launch --config_file"
        )
        raise UsageError(OWN, what, advice)
    precision = state.get("_mixed_precision", "no")
    if precision != "no":
        what = f"has mixed_precision={precision!r}"
        raise UsageError(OWN, what, "make it with 'no', and give --mixed_precision")
    plugin = state.get("dynamo_plugin")
    if plugin is not None and plugin.backend != DynamoBackend.NO:
        raise UsageError(OWN, "has a dynamo_plugin, which dstrain does not use")
    steps = GradientState().num_steps if GradientState._shared_state else 1
    if steps not in (1, accumulation_steps):
        what = f"is {accumulation_steps}, but {OWN} has {steps}; change one of them"
        raise UsageError("--gradient_accumulation_steps", what)
