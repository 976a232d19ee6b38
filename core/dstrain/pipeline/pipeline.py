"""Load a pipeline, and generate with it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from dstrain.config import LoraFile
from dstrain.config.fields import check_value
from dstrain.config.lora_file import Alpha
from dstrain.config.options import GenerateConfig, Hub
from dstrain.config.plugin_options import flags
from dstrain.config.validation import check_plugins
from dstrain.errors import Diverged, StateError, UsageError
from dstrain.graph import NEGATIVE, POSITIVE, PipelineSpec, Plan
from dstrain.graph.keepers import BEFORE_LORA, WITH_LORA
from dstrain.lora import (
    add_layers,
    base_shapes,
    log_differences,
    merge,
    read_lora,
    type_named,
)
from dstrain.lora.layers import by_weight, together
from dstrain.models import Found, ModelConfig
from dstrain.models.device import usable_device
from dstrain.models.functional import damaged_weight
from dstrain.models.placing import OwnRows
from dstrain.pipeline.arguments import NOT_GIVEN, checked, is_list, one_by_one
from dstrain.pipeline.bound_spec import BoundSpec
from dstrain.pipeline.generated import Output, as_output
from dstrain.pipeline.inference_plan import find_for_inference, plan_inference
from dstrain.pipeline.keeping import keepers_for_inference
from dstrain.pipeline.loading import NO_PARTS, load_components
from dstrain.pipeline.loss_masks import LATENTS
from dstrain.pipeline.model_choice import choose_model, naming_keywords
from dstrain.pipeline.sampler import (
    OnStep,
    SamplerOptions,
    check_noise,
    integrate,
    maker_of,
    seeded_noise,
)
from dstrain.pipeline.start_image import fitted_start
from dstrain.pipeline.variant_choice import choose_variant, score_inputs
from dstrain.randomness import Rng, SampleKey
from dstrain.registry import ModelFamily, disabling, extensions_in_use


class Pipeline(BoundSpec):
    """A pipeline spec with its components, for training and inference alike."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "",
        model_configs: Sequence[ModelConfig] = (),
        variant: str | None = None,
        device: torch.device | str | None = None,
        torch_dtype: torch.dtype = torch.float32,
        *,
        tokenizer_config: ModelConfig | None = None,
        processor_config: ModelConfig | None = None,
        hub: Hub | None = None,
        **options: Any,
    ) -> "Pipeline":
        """Load everything that inference needs.

        Raises StateError for files that are missing or do not fit, UsageError for an
        unknown family or variant, and for options that it cannot have.

        Args:
            model: The model in one word: a published id, ID or ID@REVISION, a folder or a
                file; or the name of an installed family, where `model_configs` are all
                files of the model.
            model_configs: Files, which replace those of the model of the same component.
            variant: The variant; by default the one that the files tell, and of several that
                they may be, the one that `dstrain generate --prompt` takes.
            device: By default, the GPU if there is one.
            torch_dtype: The dtype of the components.
            tokenizer_config: Files of the tokenizer, where they are not beside the model's.
            processor_config: Files of the processor, likewise.
            hub: The hub to fetch missing files of `model` from; by default that of the
                environment. Each of `model_configs` names its own.
            options: Options of plugins for `dstrain generate`, such as how weights are
                kept.
        """
        device = usable_device(device, "from_pretrained(device=...)")
        model = str(model) if isinstance(model, Path) else model
        folders = {"tokenizer": tokenizer_config, "processor": processor_config}
        given = GenerateConfig(output=Path(), hub=hub, **options)
        with naming_keywords(GenerateConfig), disabling(given.disabled_plugins):
            for flag in flags(GenerateConfig):
                check_value(flag, getattr(given, flag.name))
            check_plugins(given)
            extensions_in_use().refuse_unheard(given)
            loaded, models = choose_model(model, model_configs, folders, hub)
            # That is assumed before anything is known of its calls.
            fits = score_inputs(("prompt",))
            name = choose_variant(loaded, variant, models, fits=fits)
            spec = loaded.spec(name)
            given = replace(given, model=loaded.name)
            keepers = keepers_for_inference(given, loaded, spec, models)
            found = find_for_inference(loaded, spec, models, keepers)
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
        trained: Collection[str] = (),
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
            trained: Components of which something will be trained; the caller lets keepers
                prepare these.
        """
        found = replace(found, keepers=found.keepers.copies())
        components, configs = load_components(
            family, spec, found, device, dtype, full_precision, empty, parts
        )
        loaded = components.items()
        networks = {name: one for name, one in loaded if isinstance(one, nn.Module)}
        ready = {name: one for name, one in networks.items() if name not in trained}
        if empty:
            found.keepers.check(networks, device, BEFORE_LORA)
            found.keepers.check(ready, device, WITH_LORA)
            device = torch.device("meta")
        else:
            found.keepers.prepared(ready, device)
        return cls(
            spec=spec,
            family=family,
            components=components,
            configs=configs,
            config_entries=found.configs,
            device=device,
            dtype=dtype,
            files=found.files,
            keepers=found.keepers,
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

        Raises what `read_lora` raises, and UsageError for a scale that is no number and for
        what would be merged into weights that are stored in another form. Logs a warning for
        what it was trained with that differs here.

        Args:
            path: The file.
            scale: The factor of all that it changes.
            component: The component that it is for, if the file does not say it.
            alpha: Alpha of its layers, if the file does not state it.
            skip_missing: Whether to leave out layers that the components lack.
        """
        if not isfinite(scale):
            what = f"scale: expected a finite number, got {scale!r}"
            raise UsageError("load_lora()", what)
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
            changes, added = dict(lora.merged), []
            for kind, layers in lora.by_type.items():
                scales = scale == 1 or all(layer.scales for layer in layers.values())
                if type_named(kind, "--lora").merged or not scales:
                    changes = together(changes, by_weight(layers))
                else:
                    added.append(layers)
            with self.keepers.readable():
                merge(module, changes, scale)
            for layers in added:
                adapter_name = f"lora{len(getattr(module, 'peft_config', ()))}"
                add_layers(module, layers, scale, adapter_name)

    def damaged(self, names: Iterable[str]) -> list[str]:
        """Say which of these components have weights with NaN or infinity, and where."""
        found = []
        with self.keepers.readable():
            for name in names:
                module = self.components.get(name)
                weight = damaged_weight(module) if isinstance(module, nn.Module) else ""
                if weight:
                    files = self.files.get(name)
                    place = f" in {files.folder}" if files is not None else ""
                    what = f"the weights of {name}{place} contain NaN or infinity"
                    found.append(f"{what}: {weight}")
        return found

    # The two calls repeat their parameters: a TypedDict in `**inputs` would say them once,
    # but it allows no other names, and each variant has inputs of its own.
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
        sampler: str | None = None,
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
        sampler: str | None = None,
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
        the variant does not have, or that is of another size.

        Args:
            prompt: What to generate.
            negative_prompt: What to avoid; for several prompts, one or as many.
            seed: The seed of the initial noise; for several prompts, one or as many.
            arguments: The other fields of `SamplerOptions`, and the variant's inputs.
        """
        named = {**arguments, "prompt": prompt, "seed": seed}
        given = {name: one for name, one in named.items() if one is not None}
        if negative_prompt is not NOT_GIVEN:
            given["negative_prompt"] = negative_prompt
        source = self.spec.inputs.get("prompt")
        if source is not None and source.kind == "text" and is_list(prompt):
            return [self._generate(one) for one in one_by_one(given)]
        return self._generate(given)

    def _generate(self, arguments: Mapping[str, object]) -> Output:
        given = checked(self.spec.inputs, arguments)
        call = plan_inference(self.spec, given, family=self.family)
        inputs = call.inputs
        if call.sampling.denoising_strength is not None:
            inputs = fitted_start(self.spec, inputs, given)
        self.run(call.plan.cached_steps, inputs)
        return as_output(self.finish(call.plan, inputs, call.sampling))

    @torch.no_grad()
    def finish(
        self, plan: Plan, values: dict[str, Any], sampling: SamplerOptions
    ) -> Any:
        """Do what follows a plan's cached steps: its other steps, the sampler, the
        decoders; return the last decoder's output. `values` are the cached values.

        Raises Diverged where that is not finite, or StateError if weights are not.
        """
        values = dict(values)
        rng = Rng([SampleKey(sampling.seed, 0, 0, 0)])
        self.run(plan.train_steps, values, rng)
        try:
            latents = self.sample(values, sampling, NEGATIVE in plan.task.branches)
            if not latents.isfinite().all():
                what = "predicted NaN or infinity"
                advice = "fp16 overflows in some models: use bf16 or fp32"
                raise Diverged(self.spec.model_fn.where, what, advice)
            return self.decode(latents, values, rng)
        except Diverged as error:
            found = self.damaged(self.components)
            if found:
                lines = [f"is not finite: {found[0]}", *found[1:], "download it again"]
                raise StateError("the image", *lines) from error
            raise

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
        self, values: dict[str, Any], sampling: SamplerOptions, guided: bool
    ) -> Tensor:
        """Integrate from noise, or from a noisy image or video, to latents: (1, channels,
        ...) fp32 on the pipeline's device.
        """

        apply = self.spec.apply_guidance
        takes_timestep = "timestep" in signature(apply).parameters
        interval = self.spec.guidance_interval

        def denoise(latents: Tensor, timestep: Tensor) -> Tensor:
            positive = self.predict(values, latents, timestep).float()
            if not guided:
                return positive
            if interval and not interval[0] <= float(timestep.max()) <= interval[1]:
                return positive
            negative = self.predict(values, latents, timestep, NEGATIVE).float()
            given = {"timestep": timestep} if takes_timestep else {}
            guidance: Tensor = apply(
                positive, negative, sampling.guidance_scale, **given
            )
            return guidance

        function = self.spec.latent_shape
        given = self._inputs(function, values) | self.bind_components(function)
        shape = function.function(**given)
        if sampling.latents is None:
            noise = seeded_noise(shape, sampling.seed, sampling.rand_device)
        else:
            noise = check_noise(sampling.latents, shape)
        start = None
        if sampling.denoising_strength is not None:
            start = values[LATENTS].to(self.device), sampling.first_step
        # Of several experts, each is on the device where it predicts.
        takes_turns = self.spec.experts is not None
        with nullcontext() if takes_turns else self.on_device(self.spec.model_fn):
            return integrate(
                self.spec.schedule,
                self.constrain_latents(values),
                denoise,
                noise.to(self.device, torch.float32),
                sampling.num_inference_steps,
                sampling.on_step,
                start,
                maker_of(self.spec, sampling.sampler),
                sampling.seed,
            ).latents
