"""Define units, functions that return a TypedDict which lists their outputs, and tasks, losses
with what they need.
"""

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dstrain.errors import UsageError
from dstrain.graph.function_spec import POSITIVE, FunctionSpec
from dstrain.graph.inputs import Column, Constant, Input
from dstrain.graph.read_only import read_only
from dstrain.graph.values import copy_value, kind_of


@dataclass(frozen=True, init=False)
class Unit(FunctionSpec):
    """A preprocessing or decoding function that also declares its outputs."""

    outputs: Mapping[str, str] = field(init=False)
    """Value name -> kind, in the order of the TypedDict that the function returns."""

    def __init__(
        self, function: Callable[..., Any], given: tuple[str, ...] = ()
    ) -> None:
        """Build a unit from a function that returns a TypedDict, its parameters as in
        `FunctionSpec.of`; raises UsageError when the declaration is incomplete.
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
        self, values: Mapping[str, Any], components: Mapping[str, Any], **given: Any
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


GIVEN_TO_LOSS = ("predict",)


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
