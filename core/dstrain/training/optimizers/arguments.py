"""Read --optimizer_args, and check them against the constructor of the optimizer."""

import ast
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dstrain.errors import UsageError, nearest

FLAG = "--optimizer_args"
OWN_FLAGS = MappingProxyType(
    {"lr": "--learning_rate", "weight_decay": "--weight_decay"}
)
"""Arguments that have a flag of their own."""
NOT_GIVEN = ("self", "params")


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Parse `name=value` words; values are Python literals, and text that is none
    stands for itself. Raises UsageError for a word without a name, and for a name that
    is given twice or has a flag of its own.
    """
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise UsageError(FLAG, f"expected NAME=VALUE, got {word!r}")
        if name in arguments:
            raise UsageError(FLAG, f"{name} is given twice")
        if name in OWN_FLAGS:
            raise UsageError(FLAG, f"{name} is given by {OWN_FLAGS[name]}")
        arguments[name] = _literal(text.strip())
    return arguments


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def parameters_of(optimizer: type) -> dict[str, Any]:
    """Return the arguments of an optimizer's constructor with their defaults, those of
    its base class included where it passes others on; `inspect.Parameter.empty` stands
    for none, and the parameters to optimize are left out.
    """
    found: dict[str, Any] = {}
    for cls in optimizer.__mro__:
        if "__init__" not in vars(cls):
            continue
        signature = inspect.signature(vars(cls)["__init__"])
        passes_on = False
        for position, (name, one) in enumerate(signature.parameters.items()):
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                passes_on |= one.kind is one.VAR_KEYWORD
            elif position > 1:  # self and what is optimized
                found.setdefault(name, one.default)
        if not passes_on:
            break
    # Of torch's own base class.
    found.pop("defaults", None)
    return {name: value for name, value in found.items() if name not in NOT_GIVEN}


def check_arguments(
    where: str, arguments: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments of --optimizer_args in the kinds of their defaults, the `known`;
    raises UsageError for an unknown one, naming the nearest, and for a value that
    cannot stand for the default.
    """
    checked = {}
    for name, value in arguments.items():
        if name not in known:
            options = [one for one in known if one not in OWN_FLAGS]
            what = f"{where} has no argument {name!r}{nearest(name, options)}"
            raise UsageError(FLAG, what, f"its arguments: {', '.join(options)}")
        default = known[name]
        fitting = _in_kind_of(default, value)
        # `weight_decay=0` is a default of some that take any number.
        is_zero = type(default) is int and not default
        kinds = (int, float) if is_zero else type(default)
        is_free = default in (None, inspect.Parameter.empty) or value is None
        if not is_free and not isinstance(fitting, kinds):
            raise UsageError(
                FLAG, f"{where}: expected {name} like {default!r}, got {value!r}"
            )
        checked[name] = fitting
    return checked


def _in_kind_of(default: Any, value: Any) -> Any:
    """Return an int in place of which there is a float by default as one, and a list for a
    tuple as a tuple; what is of another kind as it is.
    """
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, tuple | list):
        # Some take a third of what has two by default.
        return tuple(_in_kind_of(default[0], item) for item in value)
    return value
