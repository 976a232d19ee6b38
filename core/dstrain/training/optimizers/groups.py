"""Give each trained parameter its learning rate."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dstrain.config import LearningRates
from dstrain.errors import UsageError, first_few, nearest
from dstrain.lora.adapters import UP

FLAG = "--learning_rate"


def check_names(
    rates: LearningRates,
    components: Sequence[str],
    aliases: Mapping[str, Sequence[str]],
) -> LearningRates:
    """Return the rates by the names of trained components.

    Raises UsageError for a name of none of these, and for a component without a rate.

    Args:
        rates: As they are given.
        components: The trained components.
        aliases: Another name -> the components that it stands for.
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
            raise UsageError(FLAG, what, f"trained: {', '.join(components)}")
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
            raise UsageError(FLAG, what, advice)
    return named


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], rates: LearningRates, b_ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, one for each learning rate, in the order of the
    parameters; a single one is without a rate of its own.

    Raises UsageError for a name that fits no parameter, and for parameters that no name
    fits.

    Args:
        parameters: 'component.name' -> trained parameter.
        rates: Learning rates by the names of components and parts of them.
        b_ratio: Factor of the learning rate of LoRA's B matrices (Hayou et al. 2024,
            "LoRA+: efficient low rank adaptation of large models").
    """
    for name in rates.by_name:
        if not any(f"{one}.".startswith(f"{name}.") for one in parameters):
            parts = {one.rpartition(".")[0] for one in parameters}
            what = f"nothing of {name!r} is trained{nearest(name, parts)}"
            raise UsageError(FLAG, what)
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
        raise UsageError(FLAG, what, "give a first number for all others")
    return [{"params": own, "lr": rate} for rate, own in groups.items()]
