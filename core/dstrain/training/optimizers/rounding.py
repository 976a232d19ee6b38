"""Train bf16 weights without a copy in fp32: updates are computed in fp32, and rounded
up or down by chance.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LOST_BITS = 16
"""Low bits of an fp32 number that a bf16 number lacks."""


def round_stochastically(values: Tensor) -> Tensor:
    """Round fp32 numbers to bf16, up with the chance that keeps their mean.

    Rounded to the nearest, an update of less than half of a weight's last bit, one 256th
    of it, would always be lost. The chances come from torch's global generator.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(
        0, 1 << LOST_BITS, bits.shape, dtype=torch.int32, device=bits.device
    )
    # The sum carries into the kept bits with the chance that the lost ones stand for; the
    # sign is a bit of its own, so that this holds for negative numbers, too.
    kept = (bits + noise) & -(1 << LOST_BITS)
    return kept.view(torch.float32).to(torch.bfloat16)


def stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Return an fp32 parameter of the same shape that takes no memory."""
    return nn.Parameter(_nothing(parameter))


def _nothing(like: Tensor) -> Tensor:
    """Return fp32 zeros of the shape, all of which are one number."""
    return torch.zeros((), device=like.device).expand(like.shape)


class StochasticRounding(Optimizer):
    """An optimizer of bf16 parameters around one that computes in fp32.

    The other optimizer has stand-ins, of which one at a time holds a parameter's numbers.
    So it may write to its parameters as it likes, as 8-bit ones do, but must not compute
    anything from all of them. Parameters themselves stay in bf16: DDP would no longer
    notice the gradients of one that was of another dtype meanwhile.
    """

    def __init__(
        self,
        inner: Optimizer,
        parameters: Mapping[nn.Parameter, nn.Parameter],
        exact: bool = False,
    ) -> None:
        """Take an optimizer before its first step, with each parameter that it has,
        made by `stand_in` -> the trained one; `exact` ones are fp32, and need no
        rounding.
        """
        # Groups, state and defaults are those of the other.
        self.inner = inner
        self.parameters = dict(parameters)
        self.exact = exact
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch's is an attribute
        """Return the groups of the other."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch's is an attribute
        """Return the state of the other."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # torch's is an attribute
        """Return the arguments of the other."""
        return self.inner.defaults

    def __repr__(self) -> str:
        """Name the other."""
        return f"StochasticRounding({self.inner!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # two in torch
        """Make a step with each parameter that has a gradient, in order; gradients are
        used up.
        """
        if closure is not None:
            raise NotImplementedError("a closure would see weights in two precisions")
        groups = self.inner.param_groups
        try:
            for group in groups:
                self._step_group(group)
        finally:
            self.inner.param_groups = groups
        return None

    def _step_group(self, group: dict[str, Any]) -> None:
        before = dict(group)
        after = before
        for parameter in group["params"]:
            trained = self.parameters[parameter]
            if trained.grad is None:
                continue
            parameter.data = trained.detach().to(torch.float32, copy=True)
            parameter.grad = trained.grad.float()
            trained.grad = None
            # What optimizers count in a group, they count once for a step.
            after = {**before, "params": [parameter]}
            self.inner.param_groups = [after]
            step: Callable[[], Any] = self.inner.step
            step()
            updated = parameter.detach()
            trained.copy_(updated if self.exact else round_stochastically(updated))
            parameter.grad = None
            parameter.data = _nothing(trained)
        group.update({key: one for key, one in after.items() if key != "params"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the other's, which is in its own precision."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back as it was saved."""
        self.inner.load_state_dict(state_dict)
