"""Average what is trained over the optimizer steps: by the exponential moving average of
--ema_decay, or as some optimizers do themselves.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MovingAverage:
    """The average of the trained parameters, in fp32; without a decay, of none.
    Training is the same with and without it.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], decay: float | None
    ) -> None:
        """Start from the parameters as they are; a step keeps `decay` of the average,
        between 0 and 1, and None averages nothing.
        """
        self.decay = 0.0 if decay is None else decay
        self._parameters = {} if decay is None else dict(parameters)
        self.tensors: dict[str, Tensor] = {}
        """Parameter name -> its average, fp32."""
        self.steps = 0
        """Optimizer steps in the average."""
        self.restart()

    def __bool__(self) -> bool:
        """Return whether anything is averaged."""
        return bool(self._parameters)

    @property
    def facts(self) -> dict[str, str]:
        """Return what is kept beside the tensors of an average: decay and steps."""
        if not self:
            return {}
        return {"decay": repr(self.decay), "steps": str(self.steps)}

    def restart(self) -> None:
        """Begin again, from the parameters as they are."""
        self.steps = 0
        self.tensors = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Continue from the tensors of an average over this many steps."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])
        self.steps = steps

    @torch.no_grad()
    def update(self) -> None:
        """Count the parameters as an optimizer step left them: average = d * average +
        (1 - d) * parameter, d = min(decay, (1 + steps) / (10 + steps)).

        The decay rises, as in `tf.train.ExponentialMovingAverage` and diffusers'
        EMAModel, since untrained weights would weigh most in a short run.
        """
        if not self:
            return
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        now = [parameter.detach().float() for parameter in self._parameters.values()]
        # Its own annotations are incomplete.
        average: Callable[..., None] = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average(list(self.tensors.values()), now, None)
        self.steps += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the parameters are the average; afterwards, also after an error, what
        they were, bit for bit.

        The average is not to be read within: it may hold the parameters.
        """
        with ExitStack() as stack:
            for name, parameter in self._parameters.items():
                average = self.tensors[name]
                if average.dtype == parameter.dtype:
                    # No copy of all that is trained is needed: one tensor at a time.
                    _exchange(parameter, average)
                    stack.callback(_exchange, parameter, average)
                else:
                    # Rounded to the dtype of the parameter, the average could not be
                    # had back from it.
                    stack.callback(_put, parameter, parameter.detach().clone())
                    _put(parameter, average)
            yield


@torch.no_grad()
def _exchange(one: Tensor, other: Tensor) -> None:
    before = one.detach().clone()
    one.copy_(other)
    other.copy_(before)


@torch.no_grad()
def _put(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)


def has_modes(optimizer: Optimizer | Callable[..., Optimizer]) -> bool:
    """Return whether an optimizer trains other weights than those to be used, as
    schedule-free ones do.
    """
    return callable(getattr(optimizer, "eval", None))


@contextmanager
def in_eval_mode(optimizer: Optimizer) -> Iterator[None]:
    """Put the averaged weights in place of those in training, which come back bit for
    bit.
    """
    if not has_modes(optimizer):
        yield
        return
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    # The two modes are computed from each other, which rounds: a save would change what
    # is trained after it.
    kept = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()  # type: ignore[attr-defined]  # of schedulefree
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]  # of schedulefree
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
