"""A unit: one plain function of preprocessing, whose signature is its declaration.

Parameters before the `*` are values it reads, keyword-only parameters are components it
borrows, and the TypedDict it returns lists what it makes.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dstrain.errors import UsageError
from dstrain.graph.values import copy_if_shared, kind_of, storage_ids

CONTEXT = frozenset({"device", "dtype", "rng", "branch"})
"""Names any function may borrow that are not components; `<component>_config` is
another.
"""
LOSS_CONTEXT = CONTEXT | {"timestep_sampler", "constrain_latents", "sampler"}


@dataclass(frozen=True)
class FunctionSpec:
    """What a function needs: `reads` (value name -> is it required?) and `borrows`
    (component names).
    """

    name: str
    function: Callable[..., Any]
    inputs: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    components: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, function: Callable[..., Any], given: tuple[str, ...] = ()
    ) -> "FunctionSpec":
        """Read the signature off a function; the caller supplies the parameters named
        in `given` itself.

        Raises UsageError for *args, **kwargs, a positional-only parameter or a default
        on a borrowed name.
        """
        inputs: dict[str, bool] = {}
        components: list[str] = []
        where = _where(function)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
                parameter.POSITIONAL_ONLY,
            ):
                raise UsageError(
                    where, f"parameter {parameter} hides names; write each one out"
                )
            if parameter.kind is parameter.KEYWORD_ONLY:
                if parameter.default is not parameter.empty:
                    raise UsageError(
                        where,
                        f"borrowed name {parameter.name!r} has a default; a borrowed name is always given",
                    )
                components.append(parameter.name)
            elif parameter.name not in given:
                inputs[parameter.name] = parameter.default is parameter.empty
        return cls(
            _name(function), function, MappingProxyType(inputs), tuple(components)
        )

    @property
    def required(self) -> tuple[str, ...]:
        """Names this function cannot run without."""
        return tuple(name for name, needed in self.inputs.items() if needed)


@dataclass(frozen=True, init=False)
class Unit(FunctionSpec):
    """A function of preprocessing that also declares its outputs and its version."""

    outputs: Mapping[str, str] = field(init=False)
    """Value name -> kind, in the order of the TypedDict that the function returns."""
    version: int = field(init=False)
    """Raise it when the function computes something else: cached results of older
    versions are then not used.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        version: int = 1,
        given: tuple[str, ...] = (),
    ) -> None:
        """Read a unit off a function that returns a TypedDict.

        Args:
            function: its parameters are as `FunctionSpec.of` wants them.
            version: of what it computes.
            given: parameters that the caller itself supplies.

        Raises UsageError when the declaration is incomplete.
        """
        spec = FunctionSpec.of(function, given)
        where = _where(function)
        returned = typing.get_type_hints(function).get("return")
        if not typing.is_typeddict(returned):
            raise UsageError(
                where,
                f"returns {returned!r}; a unit returns a TypedDict that names its outputs",
            )
        outputs = {
            name: kind_of(hint, f"{where} -> {name}")
            for name, hint in typing.get_type_hints(returned).items()
        }
        both = sorted(set(outputs) & set(spec.inputs))
        if both:
            raise UsageError(
                where,
                f"{', '.join(both)} is both an input and an output; rename the output",
            )
        fields = {
            **vars(spec),
            "outputs": MappingProxyType(outputs),
            "version": version,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # the class is frozen

    def run(
        self, values: Mapping[str, Any], lent: Mapping[str, Any], **given: Any
    ) -> dict[str, Any]:
        """Call the function with the values it reads and the components it borrows;
        return exactly what it promised.

        An optional read that is absent takes the function's default. Raises UsageError
        if promised and made differ.
        """
        arguments = {name: values[name] for name in self.inputs if name in values}
        made = self.function(
            **given, **arguments, **{name: lent[name] for name in self.components}
        )
        if set(made) != set(self.outputs):
            missing, extra = (
                sorted(set(self.outputs) - set(made)),
                sorted(set(made) - set(self.outputs)),
            )
            raise UsageError(
                f"unit {self.name}",
                f"promised and made differ: missing {missing}, not promised {extra}",
            )
        held = storage_ids(arguments.values())
        return {name: copy_if_shared(value, held) for name, value in made.items()}


def component_of(borrowed: str) -> str:
    """The component a borrowed name belongs to: 'dit_config' -> 'dit', 'vae' -> 'vae'."""
    return borrowed.removesuffix("_config")


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _where(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{_name(function)}"
