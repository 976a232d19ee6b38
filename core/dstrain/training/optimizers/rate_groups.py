"""Build the optimizer of a run, and give each trained parameter its learning rate."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dstrain.config import LearningRates
from dstrain.errors import UsageError, first_few, nearest
from dstrain.lora.adapters import UP
from dstrain.training.optimizers.from_options import OptimizerChoice
from dstrain.training.optimizers.rounding import StochasticRounding, stand_in
from dstrain.training.optimizers.trial import ESTIMATE, construct, enter_training

RATE = "--learning_rate"


def build_optimizer(
    choice: OptimizerChoice, parameters: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Build an optimizer of these parameters, 'component.name' -> parameter; raises
    UsageError for tensors that it cannot optimize, and for learning rates that do not
    fit them.
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
    """Lay the matrices of the state out row by row, as they are read back: SOAP's are
    column by column, whose products are rounded otherwise, and a resumed run would
    differ.
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
    """Return the learning rate of the first parameters' next step, with Prodigy's own
    factor.
    """
    group = optimizer.param_groups[0]
    estimate = group.get(ESTIMATE, 1.0)
    return float(group["lr"]) * float(estimate)


def check_names(
    rates: LearningRates,
    components: Sequence[str],
    aliases: Mapping[str, Sequence[str]],
) -> LearningRates:
    """Return the rates by the names of trained components; `aliases` have others for
    several.

    Raises UsageError for a name of none of these, and for a component without a rate.
    """
    by_name: dict[str, float] = {}
    for name, rate in rates.by_name.items():
        component, dot, part = name.partition(".")
        # The denoiser's name may be that of one expert too, which is meant if it is trained.
        meant = [component] if component in components else aliases.get(component, [])
        known = [one for one in meant if one in components]
        if not known:
            hint = nearest(component, components)
            what = f"{component!r} is not trained{hint}"
            raise UsageError(RATE, what, f"trained: {', '.join(components)}")
        by_name |= {one + dot + part: rate for one in known}
    named = LearningRates(rates.others, by_name)
    # One number, however it is written: what identifies a run contains it.
    if set(by_name) == set(components) and len(set(by_name.values())) == 1:
        return LearningRates(by_name[components[0]])
    heads = {name.partition(".")[0] for name in by_name}
    for component in components:
        if rates.others is None and component not in heads:
            what = f"{component} is trained, too, and has none"
            advice = f"give {rates},{component}=RATE, or a first number for all others"
            raise UsageError(RATE, what, advice)
    return named


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], rates: LearningRates, b_ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, one for each learning rate, in the order of
    the parameters, 'component.name' -> parameter; a single one is without a rate of its
    own.

    Raises UsageError for a name that fits no parameter, and for parameters that no name
    fits.

    b_ratio: Factor of the learning rate of LoRA's B matrices (Hayou et al. 2024,
    "LoRA+: efficient low rank adaptation of large models").
    """
    for name in rates.by_name:
        if not any(f"{one}.".startswith(f"{name}.") for one in parameters):
            parts = {one.rpartition(".")[0] for one in parameters}
            what = f"nothing of {name!r} is trained{nearest(name, parts)}"
            raise UsageError(RATE, what)
    groups: dict[float, list[nn.Parameter]] = {}
    without = []
    for name, parameter in parameters.items():
        rate = rates.of(name)
        if rate is None:
            without.append(name)
            continue
        if UP.search(name):
            rate *= b_ratio
        groups.setdefault(rate, []).append(parameter)
    if without:
        what = f"{len(without)} trained parameters have none: {first_few(without)}"
        raise UsageError(RATE, what, "give a first number for all others")
    return [{"params": own, "lr": rate} for rate, own in groups.items()]
