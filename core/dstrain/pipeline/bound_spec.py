"""Bind a pipeline spec to components, and call its units and model_fn with them: the same
in training and in inference.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph import POSITIVE, ConstrainLatents, FunctionSpec, PipelineSpec, Step
from dstrain.graph.function_spec import component_of
from dstrain.graph.keepers import AS_LOADED, Keepers
from dstrain.graph.noise_process import LatentConstraint, constrain_nothing
from dstrain.graph.plan import value_key
from dstrain.graph.read_only import read_only
from dstrain.models import Config, Files
from dstrain.randomness import Rng
from dstrain.registry import ModelFamily


@dataclass
class BoundSpec:
    """A pipeline spec with its components."""

    spec: PipelineSpec
    family: ModelFamily
    components: dict[str, Any]
    """The modules and tokenizers that are loaded, by name."""
    configs: Mapping[str, Any] = field(default_factory=dict)
    """Configurations, also of components that are not loaded, by name."""
    config_entries: Mapping[str, Config] = field(default_factory=dict)
    """The entries of their config.json, by name."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    """The dtype of components that are not trained, in which model_fn computes."""
    files: Mapping[str, Files] = field(default_factory=dict)
    """The files that components were loaded from."""
    keepers: Keepers = AS_LOADED
    """How weights are kept."""

    def bind_components(
        self, function: FunctionSpec, expert: str = "", **context: Any
    ) -> dict[str, Any]:
        """Return the keyword arguments of a function: its components, and the values of
        `context` that it asks for.

        Raises UsageError for a component that is not loaded.

        Args:
            function: The function.
            expert: The expert to use as the denoiser, if several are loaded.
            context: Values that are not components ('rng', 'branch').
        """
        context |= {"device": self.device, "dtype": self.dtype}
        for name in function.components:
            if name not in context:
                context[name] = self._component(name, expert, function)
        return {name: context[name] for name in function.components}

    def run(
        self, steps: Iterable[Step], values: dict[str, Any], rng: Rng | None = None
    ) -> None:
        """Run units in order, adding their outputs to `values`."""
        for step in steps:
            unit = step.unit
            branch = step.branch or POSITIVE
            scope = f"{unit.name}.{step.branch}"
            scoped = None if rng is None else rng.scoped(scope)
            components = self.bind_components(unit, rng=scoped, branch=branch)
            # A step names only inputs that its row has. One that is not there is an error:
            # with the function's default in its place, another loss would result.
            inputs = {name: values[key] for name, key in step.inputs.items()}
            with self.on_device(unit):
                outputs = unit.run(inputs, components)
            for name, value in outputs.items():
                values[step.outputs[name]] = value

    def on_device(
        self, function: FunctionSpec, expert: str = ""
    ) -> AbstractContextManager[object]:
        """Return a context in which the components of a function are on the device.

        expert: The expert that is the denoiser, if several are loaded.
        """
        if not self.keepers:
            return nullcontext()
        names = (self._loaded_name(name, expert) for name in function.components)
        return self.keepers.on_device(names)

    def predict(
        self,
        values: Mapping[str, Any],
        noisy_latents: Tensor,
        timestep: Tensor,
        branch: str = POSITIVE,
    ) -> Tensor:
        """Call model_fn under autocast with the conditions of one branch; return the
        prediction, shaped as `noisy_latents`.

        If several experts are loaded, each predicts the samples at its own timesteps.
        """
        conditions = self._inputs(self.spec.model_fn, values, branch)
        experts = self.spec.experts
        if experts is None or len(self.components.keys() & {*experts.components}) < 2:
            return self._predict("", noisy_latents, timestep, conditions, branch)
        # A sample may have a timestep for each token: the noisiest decides.
        noisiest = timestep.reshape(len(timestep), -1).amax(1)
        chosen = [experts.choose(one) for one in noisiest.tolist()]
        predictions: dict[int, Tensor] = {}
        for expert in dict.fromkeys(chosen):
            rows = [row for row, one in enumerate(chosen) if one == expert]
            selected = recursively_apply(itemgetter(rows), conditions)
            noisy, at = noisy_latents[rows], timestep[rows]
            part = self._predict(expert, noisy, at, selected, branch)
            predictions.update(zip(rows, part, strict=True))
        return torch.stack([predictions[row] for row in range(len(chosen))])

    def constrain_latents(self, values: Mapping[str, Any]) -> ConstrainLatents:
        """Return the variant's `constrain_latents`, inputs and components filled in."""
        function = self.spec.constrain_latents
        if function.function is constrain_nothing:
            return constrain_nothing
        inputs = self._inputs(function, values)
        components = self.bind_components(function)

        def constrain(
            latents: Tensor, timestep: Tensor, noise: Tensor
        ) -> LatentConstraint:
            given = {"latents": latents, "timestep": timestep, "noise": noise}
            with read_only(function.where, inputs | given):
                constrained: LatentConstraint = function.function(
                    latents, timestep, noise, **inputs, **components
                )
            return constrained

        return constrain

    def _inputs(
        self, function: FunctionSpec, values: Mapping[str, Any], branch: str = POSITIVE
    ) -> dict[str, Any]:
        """Return the inputs of a function that are among the values."""
        keys = {name: value_key(self.spec, name, branch) for name in function.inputs}
        return {name: values[key] for name, key in keys.items() if key in values}

    def _predict(
        self,
        expert: str,
        noisy_latents: Tensor,
        timestep: Tensor,
        conditions: Mapping[str, Any],
        branch: str,
    ) -> Tensor:
        model_fn = self.spec.model_fn
        components = self.bind_components(model_fn, expert, branch=branch)
        is_mixed = self.dtype != torch.float32
        given = {"noisy_latents": noisy_latents, "timestep": timestep}
        with (
            self.on_device(model_fn, expert),
            read_only(model_fn.where, {**given, **conditions}),
            torch.autocast(self.device.type, self.dtype) if is_mixed else nullcontext(),
        ):
            prediction: Tensor = model_fn.function(
                noisy_latents, timestep, **conditions, **components
            )
        if prediction.shape != noisy_latents.shape:
            shapes = f"{list(prediction.shape)}; the latents have {list(noisy_latents.shape)}"
            raise UsageError(model_fn.where, f"returned a prediction of shape {shapes}")
        # The next call, for the other branch, may fill the same buffer.
        return prediction.clone()

    def _loaded_name(self, name: str, expert: str) -> str:
        """Return the name of a function's component or configuration among what is
        loaded: for the denoiser and what acts beside it, that of an expert.
        """
        experts = self.spec.experts
        role = component_of(name)
        if experts is None or role not in experts.roles:
            return name
        if expert:
            return experts.component(role, expert) + name.removeprefix(role)
        # Experts differ in their weights alone: any of them has the configuration.
        own = experts.roles[role]
        loaded = [one for one in own if one in self.components]
        known = [one for one in own if one in self.configs]
        return [*loaded, *known, role][0] + name.removeprefix(role)

    def _component(self, name: str, expert: str, function: FunctionSpec) -> Any:
        name = self._loaded_name(name, expert)
        configs = {f"{one}_config": config for one, config in self.configs.items()}
        available = configs | self.components
        if name not in available:
            loaded = ", ".join(self.components) or "none"
            what = f"{name} is not loaded; loaded components: {loaded}"
            raise UsageError(f"unit {function.name}", what)
        return available[name]
