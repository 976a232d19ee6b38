"""Turn the losses of a step's micro-batches into one step of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dstrain.storage.tensor_writer import is_divided

if TYPE_CHECKING:
    # Importing it takes a second, so only runs that shard do.
    from torch.distributed.tensor import DTensor


class Updater:
    """Adds up the gradients of a step, clips them, and lets the optimizer step.

    A plugin's has this class as its base, and overrides what it does in another way. The
    loop calls the methods in the order in which they stand here, and between `clip` and
    `step` it ends a run whose loss or norm is not finite, so that no weight changes.
    """

    plugin: str = ""
    """The plugin that it is of, as errors name it; set by dstrain, '' for its own."""
    parameters: Sequence[nn.Parameter] = ()
    """What is trained."""
    optimizer: Optimizer
    max_norm: float = math.inf
    """The norm to which gradients are clipped."""
    processes: int = 1
    """DDP averages gradients over so many processes, and each loss is already a share of
    the global mean.
    """

    def start(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        max_norm: float | None,
        processes: int,
    ) -> None:
        """Take what is trained, before the first step; no norm, or 0, is no limit."""
        self.parameters = parameters
        self.optimizer = optimizer
        self.max_norm = max_norm or math.inf
        self.processes = processes

    def backward(self, loss: Tensor, ends_step: bool) -> None:
        """Add the gradients of one micro-batch; `loss` is its share of the step's mean."""
        torch.autograd.backward(loss, torch.full_like(loss, self.processes))

    def clip(self) -> Tensor:
        """Clip the gradients; return their norm before that, () fp32, equal on all
        processes.
        """
        return clip_gradients(self.parameters, self.max_norm)

    def step(self) -> None:
        """Change what is trained."""
        self.optimizer.step()


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return what it was,
    () fp32, equal on all processes.
    """
    divided: list[Any] = [one.grad for one in parameters if is_divided(one.grad)]
    if divided:
        return _clip_rows(divided, max_norm)
    gradients = [one.grad for one in parameters if one.grad is not None]
    if len({one.device for one in gradients}) != 1:
        several: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm)
        return several
    # As torch's own does it, without its search for other devices and dtypes. Norms of
    # bf16 gradients would be rounded to three digits, each and together.
    with torch.no_grad():
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([*norms]))
        torch._foreach_mul_(gradients, _factor(norm, max_norm))
    return norm


def _clip_rows(gradients: Sequence[DTensor], max_norm: float) -> Tensor:
    """Clip gradients of which each process has some rows."""
    mesh = gradients[0].device_mesh
    rows = [gradient.to_local() for gradient in gradients]
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(rows)])
    squares = norms.to(mesh.device_type).square().sum()
    # Every machine has all rows, of which a process has some.
    dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    norm = squares.sqrt()
    # torch's own cannot scale rows that are kept in RAM.
    torch._foreach_mul_(rows, _factor(norm, max_norm).to(rows[0].device))
    return norm


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what `clip_grad_norm_` multiplies gradients of this norm by."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
