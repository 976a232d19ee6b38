"""Fill a pipeline spec with components; training and inference run the same units."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn

from dstrain.config.fields import Alpha, LoraFile
from dstrain.config.options.model import Hub
from dstrain.config.validation import check_tiles
from dstrain.errors import UsageError
from dstrain.graph.noise_schedule import (
    ConstrainLatents,
    LatentConstraint,
    constrain_nothing,
)
from dstrain.graph.plan import Plan, Step, value_key
from dstrain.graph.spec import ExpertSchedule, PipelineSpec
from dstrain.graph.task import NEGATIVE, POSITIVE
from dstrain.graph.unit import FunctionSpec, component_of
from dstrain.graph.values import read_only
from dstrain.lora.adapters import add_layers, with_strength
from dstrain.lora.foreign.differences import add_differences
from dstrain.lora.header import log_differences
from dstrain.lora.key_names import base_shapes
from dstrain.lora.merging import merge_layers
from dstrain.lora.reader import read_lora
from dstrain.models.component_files import ModelConfig
from dstrain.models.components import Files, components_of
from dstrain.models.device import default_device
from dstrain.models.execution.ram import ComponentInRam
from dstrain.models.finite import damaged_weight
from dstrain.models.formats import Config
from dstrain.models.needed_components import Found
from dstrain.models.networks import OwnRows, set_dtype
from dstrain.pipeline.arguments import NOT_GIVEN, checked, is_list, one_by_one
from dstrain.pipeline.image_to_image import fitted_start
from dstrain.pipeline.loading import Loader
from dstrain.pipeline.loss_masks import LATENTS
from dstrain.pipeline.model_choice import choose_model
from dstrain.pipeline.outputs import Output, as_output
from dstrain.pipeline.sampling import (
    OnStep,
    SamplerOptions,
    Start,
    find_for_inference,
    integrate,
    plan_inference,
    seeded_noise,
)
from dstrain.pipeline.tile_choice import Tiling, check_tiling, with_tiles
from dstrain.pipeline.variant_choice import choose_variant
from dstrain.randomness import Rng, SampleKey
from dstrain.registry.family import ModelFamily

NO_PARTS: Mapping[str, OwnRows] = MappingProxyType({})


@dataclass
class Pipeline:
    """A pipeline spec with its components, for training and inference alike."""

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
    in_ram: Mapping[str, ComponentInRam] = field(default_factory=dict)
    """Components that are on the device only while something uses them."""

    @classmethod
    def from_pretrained(
        cls,
        model: str = "",
        model_configs: Sequence[ModelConfig] = (),
        variant: str | None = None,
        device: torch.device | str | None = None,
        torch_dtype: torch.dtype = torch.float32,
        tiled: bool = False,
        tile_size: int | None = None,
        tile_stride: int | None = None,
        *,
        tokenizer_config: ModelConfig | None = None,
        processor_config: ModelConfig | None = None,
        hub: Hub | None = None,
    ) -> "Pipeline":
        """Load everything that inference needs.

        Raises StateError for files that are missing or do not fit, UsageError for an
        unknown family or variant, for tiles that its VAE cannot take, or for their sides
        without `tiled`.

        Args:
            model: The model in one word: a published id, ID or ID@REVISION, a folder or a
                file; or the name of an installed family, where `model_configs` are all
                files of the model.
            model_configs: Files, which replace those of the model of the same component.
            variant: The variant, if the files do not tell it.
            device: By default, the GPU if there is one.
            torch_dtype: The dtype of the components.
            tiled: Whether the VAE encodes and decodes in tiles that overlap.
            tile_size: Side of a tile in pixels; by default, the VAE's own.
            tile_stride: Pixels from one tile to the next; by default, the share of
                `tile_size` that is the VAE's own.
            tokenizer_config: Files of the tokenizer, where they are not beside the model's.
            processor_config: Files of the processor, likewise.
            hub: The hub to fetch missing files of `model` from; by default that of the
                environment. Each of `model_configs` names its own.
        """
        check_tiles(tiled, tile_size, tile_stride)
        folders = {"tokenizer": tokenizer_config, "processor": processor_config}
        loaded, models = choose_model(model, model_configs, folders, hub)
        name = choose_variant(loaded, variant, models)
        spec = loaded.spec(name)
        tiling = Tiling(tiled, tile_size, tile_stride)
        check_tiling(tiling, loaded, spec)
        found = find_for_inference(loaded, spec, models)
        found = with_tiles(found, loaded, tiling)
        device = torch.device(device or default_device())
        return cls.from_found(loaded, spec, found, device, torch_dtype)

    @classmethod
    def from_found(
        cls,
        family: ModelFamily,
        spec: PipelineSpec,
        found: Found,
        device: torch.device,
        dtype: torch.dtype,
        full_precision: Collection[str] = (),
        empty: bool = False,
        parts: Mapping[str, OwnRows] = NO_PARTS,
    ) -> "Pipeline":
        """Load what was found, frozen and in eval mode, with preset LoRAs merged: weight
        by weight, so that no more than one of those that go to a GPU is in RAM.

        Args:
            family: The family of the components.
            spec: The pipeline they are for.
            found: Their files and configurations.
            device: The device to put modules on.
            dtype: The dtype of weights.
            full_precision: Names of components that are loaded in fp32 instead.
            empty: Read no weights: networks are built without memory, also of
                components whose configuration alone was found, and files are compared
                with them.
            parts: Component -> takes the part of each of its weights that this process
                has.
        """
        known = components_of(family)
        configs = {
            name: known[name].configure(content)
            for name, content in found.configs.items()
        }
        components = {}
        for name in dict.fromkeys((*found.files, *(found.configs if empty else ()))):
            unused = spec.unused_parameters.get(name, ())
            files = found.files.get(name)
            part = parts.get(name)
            loader = Loader(
                family,
                known[name],
                files,
                device,
                unused,
                part=part,
                tiles=found.tiles.get(name),
                variant=spec.variant,
            )
            own_dtype = torch.float32 if name in full_precision else dtype
            if empty and not known[name].is_folder:
                module = loader.build_empty(found.configs[name])
                if module is not None:
                    set_dtype(module, own_dtype)
                    components[name] = module
            else:
                components[name] = loader.load(configs.get(name), own_dtype)
        in_ram = {}
        for name, files in found.files.items():
            loaded = components.get(name)
            if files.kept.offloaded and isinstance(loaded, nn.Module) and not empty:
                in_ram[name] = ComponentInRam(loaded, device)
        if empty:
            device = torch.device("meta")
        return cls(
            spec=spec,
            family=family,
            components=components,
            configs=configs,
            config_entries=found.configs,
            device=device,
            dtype=dtype,
            files=found.files,
            in_ram=in_ram,
        )

    def load_lora(
        self,
        path: str | Path,
        scale: float = 1.0,
        component: str = "",
        alpha: Alpha | None = None,
        skip_missing: bool = False,
    ) -> None:
        """Add the layers of a LoRA file, times `scale`, to the components it was trained
        for; several files add up. What no adapter can hold is merged into the weights.

        Raises what `read_lora` raises, and UsageError for what would be merged into
        weights that are quantized. Logs a warning for what it was trained with that
        differs here.

        Args:
            path: The file.
            scale: The factor of all that it changes.
            component: The component that it is for, if the file does not say it.
            alpha: Alpha of its layers, if the file does not state it.
            skip_missing: Whether to leave out layers that the components lack.
        """
        path = Path(path)
        shapes = {
            name: base_shapes(module)
            for name, module in self.components.items()
            if isinstance(module, nn.Module)
        }
        unused = self.spec.unused_parameters
        file = LoraFile(path, scale, component, alpha, skip_missing)
        for lora in read_lora(file, self.family, shapes, unused):
            name = lora.component
            log_differences(lora, path, self.spec.variant, self.files.get(name))
            module = self.components[name]
            in_ram = self.in_ram.get(name)
            with in_ram.readable() if in_ram else nullcontext():
                merge_layers(module, lora.merged, scale)
                add_differences(module, lora.differences, scale)
            for kind, layers in lora.by_type.items():
                adapter_name = f"lora{len(getattr(module, 'peft_config', ()))}"
                if scale == 1 or kind != "dora":
                    add_layers(module, layers, scale, adapter_name)
                    continue
                with in_ram.readable() if in_ram else nullcontext():
                    layers = with_strength(module, layers, scale)
                add_layers(module, layers, adapter_name=adapter_name)

    def damaged(self, names: Iterable[str]) -> list[str]:
        """Say which of these components have weights with NaN or infinity, and where."""
        found = []
        for name in names:
            module = self.components.get(name)
            in_ram = self.in_ram.get(name)
            with in_ram.readable() if in_ram else nullcontext():
                weight = damaged_weight(module) if isinstance(module, nn.Module) else ""
            if weight:
                files = self.files.get(name)
                place = f" in {files.folder}" if files is not None else ""
                found.append(
                    f"the weights of {name}{place} contain NaN or infinity: {weight}"
                )
        return found

    def bind_components(
        self,
        function: FunctionSpec,
        expert: str = "",
        **context: Any,
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
        self,
        steps: Iterable[Step],
        values: dict[str, Any],
        rng: Rng | None = None,
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
    ) -> AbstractContextManager[None]:
        """Return a context in which the components of a function are on the device.

        expert: The expert that is the denoiser, if several are loaded.
        """
        return self._from_ram(function, expert) if self.in_ram else nullcontext()

    @contextmanager
    def _from_ram(self, function: FunctionSpec, expert: str) -> Iterator[None]:
        with ExitStack() as stack:
            for name in function.components:
                in_ram = self.in_ram.get(self._loaded_name(name, expert))
                if in_ram is not None:
                    stack.enter_context(in_ram.on_device())
            yield

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
        if experts is None or len(self._loaded(experts)) < 2:
            return self._predict("", noisy_latents, timestep, conditions, branch)
        # A sample may have a timestep for each token: the noisiest decides.
        noisiest = timestep.reshape(len(timestep), -1).amax(1)
        chosen = [experts.choose(one) for one in noisiest.tolist()]
        predictions: dict[int, Tensor] = {}
        for expert in dict.fromkeys(chosen):
            rows = [row for row, one in enumerate(chosen) if one == expert]
            selected = recursively_apply(itemgetter(rows), conditions)
            part = self._predict(
                expert, noisy_latents[rows], timestep[rows], selected, branch
            )
            predictions.update(zip(rows, part, strict=True))
        return torch.stack([predictions[row] for row in range(len(chosen))])

    def constrain_latents(self, values: Mapping[str, Any]) -> ConstrainLatents:
        """Return the variant's `constrain_latents` with its inputs and components
        filled in.
        """
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

    @overload
    def __call__(
        self,
        *,
        prompt: str | None = None,
        negative_prompt: str | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        denoising_strength: float | None = None,
        seed: int = 0,
        latents: Tensor | None = None,
        on_step: OnStep | None = None,
        rand_device: str | None = None,
        **inputs: object,
    ) -> Output: ...

    @overload
    def __call__(
        self,
        *,
        prompt: list[str] | tuple[str, ...],
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        denoising_strength: float | None = None,
        seed: int | Sequence[int] = 0,
        latents: Tensor | None = None,
        on_step: OnStep | None = None,
        rand_device: str | None = None,
        **inputs: object,
    ) -> list[Output]: ...

    @torch.no_grad()
    def __call__(
        self,
        *,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = NOT_GIVEN,
        seed: int | Sequence[int] | None = None,
        **arguments: object,
    ) -> Output | list[Output]:
        """Generate an image or video; of a list of prompts, one each, as if alone.

        What is None has the variant's default. Raises UsageError for an argument that
        the variant does not have, or that is of another type or size.

        Args:
            prompt: What to generate.
            negative_prompt: What to avoid; for several prompts, one or as many.
            seed: The seed of the initial noise; for several prompts, one or as many.
            arguments: The other fields of `SamplerOptions`, and the variant's inputs.
        """
        given = {name: one for name, one in arguments.items() if one is not None}
        named = {"prompt": prompt, "seed": seed}
        given |= {name: one for name, one in named.items() if one is not None}
        if negative_prompt is not NOT_GIVEN:
            given["negative_prompt"] = negative_prompt
        source = self.spec.inputs.get("prompt")
        if source is not None and source.kind == "text" and is_list(prompt):
            return [self._generate(one) for one in one_by_one(given)]
        return self._generate(given)

    def _generate(self, arguments: Mapping[str, object]) -> Output:
        given = checked(self.spec.inputs, arguments)
        call = plan_inference(self.spec, given)
        inputs = call.inputs
        if call.sampling.denoising_strength is not None:
            inputs = fitted_start(self.spec, inputs, given)
        self.run(call.plan.cached_steps, inputs)
        return as_output(self.finish(call.plan, inputs, call.sampling))

    @torch.no_grad()
    def finish(
        self,
        plan: Plan,
        values: dict[str, Any],
        sampling: SamplerOptions,
    ) -> Any:
        """Do what follows a plan's cached steps: its other steps, the sampler, the
        decoders; return the last decoder's output. `values` are the cached values.
        """
        values = dict(values)
        rng = Rng([SampleKey(sampling.seed, 0, 0, 0)])
        self.run(plan.train_steps, values, rng)
        latents = self.sample(values, sampling, NEGATIVE in plan.task.branches)
        return self.decode(latents, values, rng)

    @torch.no_grad()
    def decode(self, latents: Tensor, values: Mapping[str, Any], rng: Rng) -> Any:
        """Return what the last decoder makes of latents, and of the values it reads."""
        values = dict(values)
        outputs: dict[str, Any] = {}
        for decoder in self.spec.decoders:
            inputs = self._inputs(decoder, values)
            own_rng = rng.scoped(f"{decoder.name}.{POSITIVE}")
            components = self.bind_components(decoder, rng=own_rng, branch=POSITIVE)
            with self.on_device(decoder):
                outputs = decoder.run(inputs, components, latents=latents)
            values |= outputs
        return [*outputs.values()][-1]

    def sample(
        self,
        values: dict[str, Any],
        sampling: SamplerOptions,
        guided: bool,
    ) -> Tensor:
        """Integrate from noise, or from a noisy image or video, to latents: (1, channels,
        ...) fp32 on the pipeline's device.
        """

        def velocity(latents: Tensor, timestep: Tensor) -> Tensor:
            positive = self.predict(values, latents, timestep).float()
            if not guided:
                return positive
            negative = self.predict(values, latents, timestep, NEGATIVE).float()
            scale = sampling.guidance_scale
            guidance: Tensor = self.spec.apply_guidance(positive, negative, scale)
            return guidance

        noise = sampling.latents
        if noise is None:
            function = self.spec.latent_shape
            shape = function.function(**self._arguments(function, values))
            noise = seeded_noise(shape, sampling.seed, sampling.rand_device)
        start = None
        if sampling.denoising_strength is not None:
            start = Start(values[LATENTS].to(self.device), sampling.first_step)
        # Of several experts, each is on the device where it predicts.
        takes_turns = self.spec.experts is not None
        with nullcontext() if takes_turns else self.on_device(self.spec.model_fn):
            return integrate(
                self.spec.schedule,
                self.constrain_latents(values),
                velocity,
                noise.to(self.device, torch.float32),
                sampling.num_inference_steps,
                sampling.on_step,
                start,
            ).latents

    def _inputs(
        self,
        function: FunctionSpec,
        values: Mapping[str, Any],
        branch: str = POSITIVE,
    ) -> dict[str, Any]:
        """Return the inputs of a function that are among the values."""
        keys = {name: value_key(self.spec, name, branch) for name in function.inputs}
        return {name: values[key] for name, key in keys.items() if key in values}

    def _arguments(
        self, function: FunctionSpec, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the inputs and the components of a function."""
        return self._inputs(function, values) | self.bind_components(function)

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

    def _loaded(self, experts: ExpertSchedule) -> list[str]:
        return [name for name in experts.components if name in self.components]

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

    def _component(
        self,
        name: str,
        expert: str,
        function: FunctionSpec,
    ) -> Any:
        name = self._loaded_name(name, expert)
        configs = {f"{one}_config": config for one, config in self.configs.items()}
        available = configs | self.components
        if name not in available:
            loaded = ", ".join(self.components) or "none"
            what = f"{name} is not loaded; loaded components: {loaded}"
            raise UsageError(f"unit {function.name}", what)
        return available[name]
