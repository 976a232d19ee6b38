"""An optimizer, named by its path: the gradient itself, times the learning rate."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Plain(Optimizer):
    """Gradient descent; counts its steps, as a state that checkpoints keep."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, gain: float = 1.0
    ) -> None:
        super().__init__(params, {"lr": lr, "gain": gain})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", torch.zeros(())) + 1
                parameter.sub_(group["lr"] * group["gain"] * parameter.grad)
