"""Units whose declaration no function's signature gives, for graphs drawn at random."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dstrain.graph.unit import Unit


def declared(
    name: str,
    function: Callable[..., Any],
    inputs: Mapping[str, bool],
    components: tuple[str, ...],
    outputs: Mapping[str, str],
    version: int = 1,
) -> Unit:
    """A unit of these fields."""
    unit = object.__new__(Unit)
    for field, value in {
        "name": name,
        "function": function,
        "inputs": MappingProxyType(dict(inputs)),
        "components": components,
        "outputs": MappingProxyType(dict(outputs)),
        "version": version,
    }.items():
        object.__setattr__(unit, field, value)
    return unit
