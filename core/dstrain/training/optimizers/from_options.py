"""Choose the optimizer that a configuration asks for, and check it before anything is
loaded.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch.optim import AdamW, Optimizer

from dstrain.config import LearningRates, parse_learning_rates
from dstrain.config.named_optimizers import OPTIMIZERS, NamedOptimizer, named
from dstrain.config.options import OptimizerOptions
from dstrain.console import silenced
from dstrain.errors import UsageError, nearest
from dstrain.training.ema import has_modes
from dstrain.training.optimizers.arguments import (
    FLAG,
    check_arguments,
    parameters_of,
    parse_arguments,
)
from dstrain.training.optimizers.schedules import schedule_at
from dstrain.training.optimizers.trial import steps_apart, try_optimizer

EXCLUDED = ("torchao",)
"""Packages whose optimizers keep state that no file can hold."""


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer that is known to make steps and to have a state that can be written."""

    name: str
    """As it was asked for."""
    kind: Callable[..., Optimizer]
    arguments: Mapping[str, Any]
    """All that it is called with, except the parameters."""
    rates: LearningRates
    b_ratio: float
    """Factor of the learning rate of LoRA's B matrices."""
    rounds: bool
    """Whether the weights are in bf16, rounded by chance after each step."""
    identity: Mapping[str, str]
    """What two runs must have in common to continue each other's state."""
    trial: Mapping[str, Any]
    """Its `state_dict()` after a step on a matrix of `SIDE` rows and columns."""

    @property
    def is_default(self) -> bool:
        """Return whether it is AdamW, called as if no flag were given."""
        return self.identity == _identity(AdamW, OPTIMIZERS["adamw"].arguments)


def choose_optimizer(options: OptimizerOptions) -> OptimizerChoice:
    """Return the optimizer that the options ask for; raises UsageError for one that is
    unknown, not installed or of no use here, and for arguments that it does not take.
    """
    if "." in options.lr_scheduler:
        schedule_at(options.lr_scheduler)  # refused before models load
    flag = "--customized_optimizer" if options.customized_optimizer else "--optimizer"
    name = options.customized_optimizer or options.optimizer
    entry = named(name)
    kind = _import(flag, name, entry)
    known = parameters_of(kind)
    given = parse_arguments(options.optimizer_args)
    given = check_arguments(name, given, known)
    rates = parse_learning_rates(options.learning_rate, entry.learning_rate)
    arguments: dict[str, Any] = {**entry.arguments, **given}
    if "lr" not in known:
        what = f"{name} takes no learning rate, so that --learning_rate would not act"
        raise UsageError(flag, what)
    plain = rates.others or next(iter(rates.by_name.values()))
    arguments["lr"] = plain
    if "weight_decay" in known:
        arguments["weight_decay"] = options.weight_decay
    elif options.weight_decay != OptimizerOptions().weight_decay:
        what = f"has no effect: optimizer {name} takes no weight decay"
        raise UsageError("--weight_decay", what)
    trial = try_optimizer(FLAG if given else flag, name, kind, arguments)
    ratio = options.loraplus_lr_ratio or 1.0
    if ratio != 1:
        try_optimizer("--loraplus_lr_ratio", name, kind, arguments, (1.0, 0.5))
    if len(set(rates.all)) > 1:
        try_optimizer("--learning_rate", name, kind, arguments, (1.0, 0.5))
    rounds = options.trainable_dtype == "bf16"
    if rounds:
        _check_rounding(name, kind, arguments)
    identity = _identity(kind, arguments)
    return OptimizerChoice(name, kind, arguments, rates, ratio, rounds, identity, trial)


def _check_rounding(
    name: str, kind: Callable[..., Optimizer], arguments: Mapping[str, Any]
) -> None:
    """Raise UsageError for an optimizer that cannot train bf16 weights."""
    flag = "--trainable_dtype"
    why = ""
    if has_modes(kind):
        why = "keeps weights of its own to average"
    elif not steps_apart(kind, arguments):
        why = "computes something from all parameters together"
    if why:
        what = f"bf16 weights are updated one after another, but {name} {why}"
        advice = "use another optimizer, such as adamw8bit, or --trainable_dtype fp32"
        raise UsageError(flag, what, advice)


def _identity(kind: type, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the class, and its arguments and defaults except those that have a flag.
    Paged optimizers have the state of the others.
    """
    bound = {
        name: repr(arguments.get(name, default))
        for name, default in parameters_of(kind).items()
        if name not in ("lr", "weight_decay", "is_paged")
        and (name in arguments or default is not inspect.Parameter.empty)
    }
    path = f"{kind.__module__}.{kind.__qualname__}"
    if path.startswith("bitsandbytes."):
        path = path.replace(".Paged", ".")
    return {"optimizer": path, **bound}


def _import(flag: str, name: str, entry: NamedOptimizer) -> type:
    """Return the class of an optimizer."""
    package, _, attribute = entry.path.rpartition(".")
    if not package:
        what = f"{name!r} is neither a known optimizer nor a dotted path{nearest(name, OPTIMIZERS)}"
        raise UsageError(flag, what, f"optimizers: {', '.join(OPTIMIZERS)}")
    top = package.partition(".")[0]
    if top in EXCLUDED:
        what = (
            f"{name}: states of optimizers of {top} are of kinds that cannot be saved"
        )
        raise UsageError(flag, what, "use --optimizer adamw8bit")
    try:
        # Libraries warn of parts that they lack.
        with silenced(logging.WARNING):
            module = import_module(package)
    except ImportError as error:
        what = f"{name} cannot be imported: {error}"
        advice = [f"pip install {entry.install}"] if entry.install else []
        raise UsageError(flag, what, *advice) from error
    kind = getattr(module, attribute, None)
    if kind is None:
        what = f"{package} has no {attribute!r}{nearest(attribute, dir(module))}"
        raise UsageError(flag, what)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UsageError(flag, f"{name} is not a class of optimizers of torch")
    if kind.__module__.partition(".")[0] in EXCLUDED:
        return _import(flag, name, NamedOptimizer(f"{kind.__module__}.{attribute}"))
    return kind
