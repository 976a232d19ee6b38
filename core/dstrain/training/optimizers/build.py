"""Build the optimizer of a run."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dstrain.errors import UsageError
from dstrain.training.optimizers.choice import OptimizerChoice
from dstrain.training.optimizers.groups import parameter_groups
from dstrain.training.optimizers.rounding import StochasticRounding, stand_in
from dstrain.training.optimizers.trial import ESTIMATE, construct, enter_training


def build_optimizer(
    choice: OptimizerChoice, parameters: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Build an optimizer of these parameters, 'component.name' -> parameter.

    Raises UsageError for tensors that it cannot optimize, and for learning rates that do
    not fit the parameters.
    """
    if not choice.rounds:
        return _build(choice, parameters)
    stand_ins = {name: stand_in(one) for name, one in parameters.items()}
    trained = {stand_ins[name]: one for name, one in parameters.items()}
    return StochasticRounding(_build(choice, stand_ins), trained)


def _build(
    choice: OptimizerChoice, parameters: Mapping[str, nn.Parameter]
) -> Optimizer:
    # A warning at every parameter's first step; the guide says it once.
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    groups = parameter_groups(parameters, choice.rates, choice.b_ratio)
    arguments = dict(choice.arguments)
    trained: Any = groups
    if len(groups) == 1:
        # Written to states as groups always were.
        arguments["lr"] = groups[0]["lr"]
        trained = groups[0]["params"]
    try:
        optimizer = construct(choice.kind, trained, arguments)
    except ValueError as error:  # of matrices alone, such as torch's Muon
        raise UsageError("--optimizer", f"{choice.name}: {error}") from error
    enter_training(optimizer)
    if not choice.is_default:
        optimizer.register_step_post_hook(_keep_layout)
    return optimizer


def _keep_layout(optimizer: Optimizer, *_: object) -> None:
    """Lay the matrices of the state out row by row, as they are read back from a file.

    SOAP's are column by column after a decomposition, and products with these are
    rounded otherwise: a resumed run would differ.
    """
    own = [one for group in optimizer.param_groups for one in group["params"]]
    for parameter in own:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            items = value if isinstance(value, list) else [value]
            for position, item in enumerate(items):
                if not isinstance(item, Tensor) or item.is_contiguous():
                    continue
                if item.shape == parameter.shape:
                    continue  # laid out like its parameter
                items[position] = item.contiguous()
            state[name] = items if isinstance(value, list) else items[0]


def effective_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of the first parameters' next step.

    Prodigy and the like multiply it by an estimate of their own.
    """
    group = optimizer.param_groups[0]
    estimate = group.get(ESTIMATE, 1.0)
    return float(group["lr"]) * float(estimate)
