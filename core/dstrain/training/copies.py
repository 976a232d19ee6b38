"""What copies of a module in several processes send each other: what is trained."""

from itertools import chain
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dstrain.training.module import TrainingModule


def keep_frozen_apart(module: TrainingModule) -> None:
    """Let `DistributedDataParallel` leave out what is frozen.

    Every process has read it from the same files. At the start DDP would send it all,
    and its buffers again before each forward pass; and float8 gloo cannot send at all.
    """
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, frozen_names(module))


def frozen_names(module: TrainingModule) -> list[str]:
    """Return the names of a module's parameters that are not trained, and of the buffers
    of its networks that no step changes.
    """
    changing = {id(buffer) for buffer in module.trained_buffers.values()}
    parameters = (
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    )
    buffers = (
        f"networks.{name}"
        for name, buffer in module.networks.named_buffers(remove_duplicate=False)
        if id(buffer) not in changing
    )
    return [*chain(parameters, buffers)]
