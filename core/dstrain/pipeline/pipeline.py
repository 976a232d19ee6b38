"""A pipeline: a variant's pipeline spec with the components that fill it. Training and
inference run the same units.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.console import get_logger
from dstrain.errors import UsageError
from dstrain.graph.plan import POSITIVE, Plan, Step, make_plan, value_key
from dstrain.graph.schedule import ConstrainLatents, LatentConstraint
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.unit import FunctionSpec, component_of
from dstrain.lora.header import training_differences
from dstrain.lora.layers import add_layers
from dstrain.lora.names import shapes_of, unused_layers
from dstrain.lora.reader import read_lora
from dstrain.models.components import Files
from dstrain.models.device import default_device
from dstrain.models.locate import Found, ModelConfig, find
from dstrain.pipeline.loading import load_components
from dstrain.pipeline.sampling import (
    NEGATIVE,
    Sampling,
    generate_task,
    integrate,
    plan_inference,
    seeded_noise,
)
from dstrain.pipeline.variants import Hints, choose_variant
from dstrain.randomness import Rng, SampleKey
from dstrain.registry.discovery import load_family
from dstrain.registry.family import ModelFamily

logger = get_logger(__name__)


@dataclass
class Pipeline:
    """components: name -> module or tokenizer, for those loaded; configs: name ->
    configuration without weights.

    dtype: the dtype of components that are not trained; autocast: the dtype model_fn
    computes in, None for none. files: what components were loaded from.
    """

    spec: PipelineSpec
    family: ModelFamily
    components: dict[str, Any]
    configs: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    files: Mapping[str, Files] = field(default_factory=dict)

    @classmethod
    def from_pretrained(
        cls,
        family: str,
        model_configs: Sequence[Any],
        variant: str | None = None,
        device: torch.device | str | None = None,
        torch_dtype: torch.dtype = torch.float32,
    ) -> "Pipeline":
        """Load everything inference needs from `ModelConfig`s; the device is the GPU if
        there is one.

        Raises StateError for files that are missing or do not fit, UsageError for an
        unknown family or variant.
        """
        loaded = load_family(family)
        spec: PipelineSpec = loaded.load("pipelines")(
            choose_variant(loaded, variant, Hints(model_configs))
        )
        return cls.from_files(loaded, spec, model_configs, device, torch_dtype)

    @classmethod
    def from_files(
        cls,
        family: ModelFamily,
        spec: PipelineSpec,
        model_configs: Sequence[ModelConfig],
        device: torch.device | str | None = None,
        torch_dtype: torch.dtype = torch.float32,
    ) -> "Pipeline":
        """Load everything that inference with every input of a pipeline spec uses; model_fn
        computes in `torch_dtype`.
        """
        plan = make_plan(spec, frozenset(spec.inputs), generate_task(spec, guided=True))
        found = find(
            family,
            model_configs,
            plan.components[""],
            plan.configs[""],
            spec.components,
        )
        place = torch.device(device) if device is not None else default_device()
        pipeline = cls.from_found(family, spec, found, place, torch_dtype)
        pipeline.autocast = None if torch_dtype == torch.float32 else torch_dtype
        return pipeline

    @classmethod
    def from_found(
        cls,
        family: ModelFamily,
        spec: PipelineSpec,
        found: Found,
        device: torch.device,
        dtype: torch.dtype,
        full_precision: Iterable[str] = (),
    ) -> "Pipeline":
        """Load the files found; see `load_components` for the arguments."""
        loaded = load_components(family, spec, found, device, dtype, full_precision)
        return cls(
            spec,
            family,
            loaded.components,
            loaded.configs,
            device,
            dtype,
            files=found.files,
        )

    def load_lora(self, path: Path, scale: float = 1.0) -> None:
        """Add the layers of a LoRA file, times `scale`, to the component it was trained
        for; several add up.

        Raises what `read_lora` raises. What was assumed of the file, and what it was
        trained with that differs here, is printed on stderr.
        """
        for lora in read_lora(
            path,
            self.family,
            self.lora_shapes(),
            optional_layers=self.optional_layers(),
        ):
            recorded = training_differences(
                path,
                lora.header,
                lora.component,
                self.spec.variant,
                self.files.get(lora.component),
            )
            for line in (*lora.notes, *recorded):
                logger.warning(line)
            module = self.components[lora.component]
            add_layers(
                module,
                lora.layers,
                scale,
                f"lora{len(getattr(module, 'peft_config', ()))}",
            )

    def lora_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return each network's layers that LoRA can be added to, with their shapes, as
        `read_lora` takes them.
        """
        networks = (
            (name, module)
            for name, module in self.components.items()
            if isinstance(module, nn.Module)
        )
        return {name: shapes_of(module) for name, module in networks}

    def optional_layers(self) -> dict[str, frozenset[str]]:
        """Return the layers of each network that no loss reaches."""
        unused_parameters = self.spec.unused_parameters
        return {
            name: unused_layers(unused_parameters.get(name, ()), shapes)
            for name, shapes in self.lora_shapes().items()
        }

    def bind_components(
        self, borrower: FunctionSpec, part: str = "", **ambient: Any
    ) -> dict[str, Any]:
        """The names a function borrows, `ambient` ones as given; `part` is the expert
        that plays its role.

        Raises UsageError for a component that is not loaded.
        """
        ambient |= {"device": self.device, "dtype": self.dtype}
        experts = self.spec.experts
        part = part or self._only_expert()
        lent = {}
        for name in borrower.components:
            played = name
            if experts and component_of(name) == experts.denoiser:
                played = (
                    part
                    or (self._configured_expert() if name != experts.denoiser else "")
                ) + name[len(experts.denoiser) :]
            lent[name] = (
                ambient[name] if name in ambient else self._component(played, borrower)
            )
        return lent

    def run(
        self, steps: Iterable[Step], values: dict[str, Any], rng: Rng | None = None
    ) -> None:
        """Run units in order, adding what they make to the table of values."""
        for step in steps:
            reads = {
                name: values[key] for name, key in step.inputs.items() if key in values
            }
            own = (
                rng.scoped(f"{step.unit.name}.{step.branch}")
                if rng is not None
                else None
            )
            made = step.unit.run(
                reads,
                self.bind_components(
                    step.unit, rng=own, branch=step.branch or POSITIVE
                ),
            )
            values.update({step.outputs[name]: value for name, value in made.items()})

    def predict(
        self,
        values: Mapping[str, Any],
        noisy_latents: Tensor,
        timestep: Tensor,
        branch: str = POSITIVE,
    ) -> Tensor:
        """Call model_fn under autocast with the conditions of one side; returns the
        prediction, shaped as `noisy`.

        Where several experts are loaded, each predicts the samples whose timesteps are
        its own.
        """
        conditions = self._reads(self.spec.model_fn, values, branch)
        parts = self._experts(timestep)
        if len(set(parts)) == 1:
            return self._predict(parts[0], noisy_latents, timestep, conditions, branch)
        made: dict[int, Tensor] = {}
        for part in dict.fromkeys(parts):
            rows = [row for row, chosen in enumerate(parts) if chosen == part]
            given = {name: _rows(value, rows) for name, value in conditions.items()}
            made |= dict(
                zip(
                    rows,
                    self._predict(
                        part, noisy_latents[rows], timestep[rows], given, branch
                    ),
                    strict=True,
                )
            )
        return torch.stack([made[row] for row in range(len(parts))])

    def _predict(
        self,
        part: str,
        noisy_latents: Tensor,
        timestep: Tensor,
        conditions: Mapping[str, Any],
        branch: str,
    ) -> Tensor:
        model_fn = self.spec.model_fn
        with (
            torch.autocast(self.device.type, self.autocast)
            if self.autocast is not None
            else nullcontext()
        ):
            prediction: Tensor = model_fn.function(
                noisy_latents,
                timestep,
                **conditions,
                **self.bind_components(model_fn, part, branch=branch),
            )
        return prediction

    def constrain_latents(self, values: Mapping[str, Any]) -> ConstrainLatents:
        """The variant's `hold` with what it reads filled in; without one, nothing is
        held.
        """
        if self.spec.constrain_latents is None:
            return _constrain_nothing
        constrain_latents = self.spec.constrain_latents
        return partial(
            constrain_latents.function,
            **self._reads(constrain_latents, values),
            **self.bind_components(constrain_latents),
        )

    @torch.no_grad()
    def __call__(self, **arguments: Any) -> Any:
        """Generate what the variant's last decoder makes (a picture) from arguments by
        name, as `planned` takes them.
        """
        call = plan_inference(self.spec, arguments)
        values = dict(call.inputs)
        self.run(call.plan.cached_steps, values)
        return self.finish(call.plan, values, call.sampling)

    @torch.no_grad()
    def finish(self, plan: Plan, values: dict[str, Any], sampling: Sampling) -> Any:
        """Do what follows a plan's frozen units: its live ones, the sampler, the
        decoders; `values` holds what crosses.
        """
        self.run(plan.train_steps, values, Rng([SampleKey(sampling.seed, 0, 0, 0)]))
        latents = self.sample(values, sampling, NEGATIVE in plan.branches)
        return self.decode(values, latents)

    def sample(
        self, values: dict[str, Any], sampling: Sampling, guided: bool
    ) -> Tensor:
        """Integrate from noise to latents: (1, channels, ...) fp32 on the pipeline's
        device.
        """

        def velocity(latents: Tensor, timestep: Tensor) -> Tensor:
            prediction = self.predict(values, latents, timestep).float()
            if not guided:
                return prediction
            negative = self.predict(values, latents, timestep, NEGATIVE).float()
            guided_prediction: Tensor = self.spec.apply_guidance(
                prediction, negative, sampling.guidance_scale
            )
            return guided_prediction

        noise, steps = (
            self.initial_noise(values, sampling),
            sampling.num_inference_steps,
        )
        schedule, constrain_latents = self.spec.schedule, self.constrain_latents(values)
        return integrate(
            schedule, constrain_latents, velocity, noise, steps, sampling.on_step
        ).latents

    def initial_noise(self, values: dict[str, Any], sampling: Sampling) -> Tensor:
        """fp32 noise of the variant's latent shape, drawn from the seed, or the latents
        that were given.
        """
        if sampling.latents is not None:
            return sampling.latents.to(self.device, torch.float32)
        reader = self.spec.latent_shape
        reads = {name: values[name] for name in reader.inputs if name in values}
        shape = reader.function(**reads, **self.bind_components(reader))
        return seeded_noise(shape, sampling.seed, sampling.rand_device).to(self.device)

    def decode(self, values: dict[str, Any], latents: Tensor) -> Any:
        """Run the decoder units on latents; returns what the last one makes."""
        table = dict(values)
        made: dict[str, Any] = {}
        for decoder in self.spec.decoders:
            reads = {name: table[name] for name in decoder.inputs if name in table}
            made = decoder.run(reads, self.bind_components(decoder), latents=latents)
            table |= made
        return list(made.values())[-1]

    def _reads(
        self, reader: FunctionSpec, values: Mapping[str, Any], branch: str = POSITIVE
    ) -> dict[str, Any]:
        keys = {name: value_key(self.spec, name, branch) for name in reader.inputs}
        return {name: values[key] for name, key in keys.items() if key in values}

    def _experts(self, timestep: Tensor) -> list[str]:
        """The expert of each sample, one '' without experts; the noisiest part of a
        sample decides.
        """
        experts, only = self.spec.experts, self._only_expert()
        if experts is None or only:
            return [only]
        return [
            experts.choose(one)
            for one in timestep.reshape(len(timestep), -1).amax(1).tolist()
        ]

    def _only_expert(self) -> str:
        """The one expert that is loaded, else ''."""
        experts = self.spec.experts
        loaded = (
            [name for name in experts.components if name in self.components]
            if experts
            else []
        )
        return loaded[0] if len(loaded) == 1 else ""

    def _configured_expert(self) -> str:
        """The first expert of which the configuration is known, else ''."""
        experts = self.spec.experts
        return (
            next((name for name in experts.components if name in self.configs), "")
            if experts
            else ""
        )

    def _component(self, name: str, borrower: FunctionSpec) -> Any:
        if name in self.components:
            return self.components[name]
        if name.endswith("_config") and name.removesuffix("_config") in self.configs:
            return self.configs[name.removesuffix("_config")]
        loaded = ", ".join(self.components) or "none"
        raise UsageError(
            f"unit {borrower.name}",
            f"{name} is not loaded; loaded components: {loaded}",
        )


def _rows(value: Any, rows: list[int]) -> Any:
    """Some samples of a collated value; what is not a tensor is the same for all."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, list):
        return [_rows(item, rows) for item in value]
    return (
        {name: _rows(item, rows) for name, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def _constrain_nothing(
    latents: Tensor, timestep: Tensor, noise: Tensor
) -> LatentConstraint:
    return LatentConstraint(latents, timestep)
