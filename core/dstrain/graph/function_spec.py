"""Read what a function declares by its signature: its inputs, and after the `*` its
components.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from dstrain.errors import UsageError
from dstrain.graph.code_digest import code_of, facts_of, module_of

Function = TypeVar("Function", bound=Callable[..., Any])
CONTEXT = frozenset({"device", "dtype", "rng", "branch"})
"""Keyword-only parameters of any function that do not name a component.
`<component>_config`, a component's configuration, is another.
"""
LOSS_CONTEXT = CONTEXT | {
    "timestep_sampler",
    "loss_options",
    "constrain_latents",
    "sampler",
    "inference_sigmas",
}
"""Such parameters of a loss."""
# Branches of classifier-free guidance:
POSITIVE = "positive"
NEGATIVE = "negative"


def versioned(version: int) -> Callable[[Function], Function]:
    """Declare the version of what a unit, or another function of a variant, computes: raise
    it when it computes something else. Cached results of older versions are then not used.

    Without one, the code of the function's module and of what this imports counts.
    """

    def declare(function: Function) -> Function:
        # With the function, as functools.wraps copies attributes to others.
        function.dstrain_version = (function, version)  # type: ignore[attr-defined]  # an attribute of ours
        return function

    return declare


@dataclass(frozen=True)
class FunctionSpec:
    """A function with what it needs."""

    name: str
    function: Callable[..., Any]
    inputs: Mapping[str, bool] = field(default_factory=dict)
    """Value name -> whether it is required."""
    components: tuple[str, ...] = ()
    """Names of the components and of the context that it uses."""
    version: int = 0
    """The version of what it computes, as `versioned` has it; 0 stands for none."""

    @classmethod
    def of(
        cls, function: Callable[..., Any], given: tuple[str, ...] = ()
    ) -> "FunctionSpec":
        """Read the signature of a function whose first parameters are those in `given`,
        which the caller itself supplies.

        Raises UsageError if it lacks these, or has *args, **kwargs or a positional-only
        parameter. A component is always passed: a default has no effect.
        """
        name = getattr(function, "__name__", type(function).__name__)
        where = f"{function.__module__}.{name}"
        inputs: dict[str, bool] = {}
        components: list[str] = []
        parameters = list(inspect.signature(function).parameters.values())
        first = tuple(parameter.name for parameter in parameters[: len(given)])
        if first != given:
            what = f"its first parameters must be {', '.join(given)}: its caller provides these"
            raise UsageError(where, what)
        for parameter in parameters[len(given) :]:
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                inputs[parameter.name] = parameter.default is parameter.empty
            elif parameter.kind is parameter.KEYWORD_ONLY:
                components.append(parameter.name)
            else:
                what = f"parameter {parameter} hides names; write each one out"
                raise UsageError(where, what)
        owner, version = getattr(function, "dstrain_version", (function, 0))
        if owner is not function:
            version = 0
        return cls(name, function, inputs, tuple(components), version)

    @property
    def where(self) -> str:
        """Return the name of the function in errors."""
        return f"{self.function.__module__}.{self.name}"

    @property
    def required(self) -> tuple[str, ...]:
        """Return the inputs without which the function cannot run."""
        return tuple(name for name, needed in self.inputs.items() if needed)

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """Return what the function is, as JSON data: module, name, and its version or
        the digests of its code; raises UsageError for code that no digest can cover.
        """
        facts: Mapping[str, Any] = {"version": self.version}
        if not self.version:
            code = code_of(self.function)
            facts = facts_of(code, f"unit {self.where}", "write @versioned(1) above it")
        return {
            "module": module_of(self.function),
            "name": getattr(self.function, "__qualname__", self.name),
            **facts,
        }


def component_of(name: str) -> str:
    """Return the component of a parameter: 'dit_config' -> 'dit', 'vae' -> 'vae'."""
    return name.removesuffix("_config")
