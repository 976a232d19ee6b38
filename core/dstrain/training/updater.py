"""Turn the losses of a step's micro-batches into one step of the optimizer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dstrain.training.optimizers import clip_gradients


class Updater:
    """Adds up the gradients of a step, clips them, and lets the optimizer step.

    A plugin's has this class as its base, and overrides what it does in another way. The
    loop calls the methods in the order in which they stand here, and between `clip` and
    `step` it ends a run whose loss or norm is not finite, so that no weight changes.
    """

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
