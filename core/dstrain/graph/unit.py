"""Read what a function declares by its signature: its inputs, components and outputs; a
task is a loss with what it needs.

Parameters before the `*` are inputs, keyword-only parameters are components, and the
TypedDict that a unit returns lists its outputs.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from dstrain.errors import UsageError
from dstrain.graph.code_digest import code_of, facts_of, module_of
from dstrain.graph.inputs import Column, Constant, Input
from dstrain.graph.values import copy_value, kind_of, read_only

Function = TypeVar("Function", bound=Callable[..., Any])

CONTEXT = frozenset({"device", "dtype", "rng", "branch"})
"""Keyword-only parameters of any function that do not name a component.
`<component>_config`, a component's configuration, is another.
"""
LOSS_CONTEXT = CONTEXT | {
    "timestep_sampler",
    "constrain_latents",
    "sampler",
    "inference_sigmas",
}
"""Such parameters of a loss."""

GIVEN_TO_LOSS = ("predict",)
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
        function.dstrain_version = (function, version)  # type: ignore[attr-defined]
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
    """That of what it computes, as `versioned` has it; 0 stands for none."""

    @classmethod
    def of(
        cls, function: Callable[..., Any], given: tuple[str, ...] = ()
    ) -> "FunctionSpec":
        """Read the signature of a function whose first parameters are those in `given`,
        which the caller itself supplies.

        Raises UsageError if the function lacks these parameters, or has *args, **kwargs
        or a positional-only parameter. A component is always passed, so that a default
        has no effect.
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
        """Return what the function is, as JSON data: module, name, and its version or the
        digests of the code that it depends on.

        Raises UsageError for code that no digest can cover, unless there is a version.
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


@dataclass(frozen=True, init=False)
class Unit(FunctionSpec):
    """A preprocessing or decoding function that also declares its outputs."""

    outputs: Mapping[str, str] = field(init=False)
    """Value name -> kind, in the order of the TypedDict that the function returns."""

    def __init__(
        self,
        function: Callable[..., Any],
        given: tuple[str, ...] = (),
    ) -> None:
        """Build a unit from a function that returns a TypedDict.

        Args:
            function: Its parameters are as `FunctionSpec.of` wants them.
            given: Parameters that the caller itself supplies.

        Raises UsageError when the declaration is incomplete.
        """
        super().__init__(**vars(FunctionSpec.of(function, given)))
        returned = typing.get_type_hints(function).get("return")
        if not typing.is_typeddict(returned):
            what = f"returns {returned!r}; a unit returns a TypedDict that names its outputs"
            raise UsageError(self.where, what)
        outputs = {}
        for name, hint in typing.get_type_hints(returned).items():
            outputs[name] = kind_of(hint, f"{self.where} -> {name}")
        # The class is frozen.
        object.__setattr__(self, "outputs", outputs)

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """Return what the unit is, with its outputs."""
        return {**super().identity, "outputs": dict(self.outputs)}

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with all that it is given and asks for."""
        return self.function(**arguments)

    def run(
        self,
        values: Mapping[str, Any],
        components: Mapping[str, Any],
        **given: Any,
    ) -> dict[str, Any]:
        """Call the function and return copies of its outputs.

        An optional input that is absent takes the function's default. Raises UsageError
        if the function returns other keys than it declares or a value that cannot be
        stored, or changes an input in place.
        """
        where = f"unit {self.name}"
        inputs = {name: values[name] for name in self.inputs if name in values}
        used = {name: components[name] for name in self.components}
        with read_only(where, {**inputs, **given}):
            outputs = self.call({**given, **inputs, **used})
        if not isinstance(outputs, Mapping) or set(outputs) != set(self.outputs):
            returned = type(outputs).__name__
            if isinstance(outputs, Mapping):
                returned = f"keys {sorted(map(str, outputs))}"
            what = f"returned {returned}; declared outputs: {list(self.outputs)}"
            raise UsageError(where, what)
        return {name: copy_value(outputs[name], where, name) for name in outputs}


def component_of(name: str) -> str:
    """Return the component of a parameter: 'dit_config' -> 'dit', 'vae' -> 'vae'."""
    return name.removesuffix("_config")


@dataclass(frozen=True)
class Task:
    """A named loss with what it needs; both stages follow from it."""

    name: str
    loss: FunctionSpec
    """A function of `predict`, of values, and after the `*` of components and context; it
    returns (batch,) losses.
    """
    branches: tuple[str, ...] = (POSITIVE,)
    """Branches of classifier-free guidance that the loss asks `predict` for."""
    inputs: Mapping[str, Input] = field(default_factory=dict)
    """Inputs that the loss uses in addition to those of the variant. It gets a list, one
    value per sample, or the value itself if that is the same in the whole batch.
    """
    from_rows: bool = True
    """False if a caller passes the inputs, and not a dataset."""

    @classmethod
    def of(
        cls,
        name: str,
        loss: Callable[..., Any],
        branches: tuple[str, ...] = (POSITIVE,),
        inputs: Mapping[str, Input] | None = None,
    ) -> "Task":
        """Return a task for a loss function; the arguments are the fields."""
        spec = FunctionSpec.of(loss, given=GIVEN_TO_LOSS)
        return cls(name, spec, branches, inputs or {})

    @property
    def listed(self) -> frozenset[str]:
        """Return the inputs of which the loss gets a list, one value per sample."""
        return frozenset(
            name
            for name, source in self.inputs.items()
            if not isinstance(source, Constant)
            and not (isinstance(source, Column) and source.same_in_batch)
        )

    @property
    def runs_sampler(self) -> bool:
        """Return whether the loss goes through all steps of the sampler, and so runs
        every expert.
        """
        return not {"sampler", "inference_sigmas"}.isdisjoint(self.loss.components)
