"""Run `dstrain generate`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from pkgutil import resolve_name

from torch import Tensor, nn

from dstrain.config import as_size, validate, with_run_options
from dstrain.config.options import GenerateConfig
from dstrain.config.plugin_options import generator_of
from dstrain.console import fitted, number_of, progress_bar, redacted, retitle
from dstrain.data.output import check_output, output_paths, save_image_or_video
from dstrain.errors import MissingFiles, UsageError
from dstrain.generation.inputs import naming_flags, noticing, parse_arguments
from dstrain.generation.pipeline_source import PipelineSource, check_used, open_source
from dstrain.graph import NEGATIVE
from dstrain.models import default_device
from dstrain.models.component_files import named_models
from dstrain.pipeline import Pipeline, plan_inference
from dstrain.pipeline.inference_plan import InferenceCall
from dstrain.pipeline.model_choice import with_family
from dstrain.pipeline.planned_weights import (
    KeptWeights,
    PlannedComponent,
    kept_weights,
    planned_component,
)
from dstrain.registry import Section, disabling, extensions_in_use
from dstrain.storage import check_writable
from dstrain.training import oom_as_error


@dataclass(frozen=True)
class PlannedGeneration:
    """A generation of which nothing is loaded, as `dstrain_dry_run` sees it."""

    config: GenerateConfig
    call: InferenceCall
    components: Mapping[str, PlannedComponent]
    """What it loads that has weights, by name."""
    kept: Mapping[str, KeptWeights]
    """How these weights are kept."""
    absent: Sequence[str]
    """The files that are not on this machine, in words."""
    stage: str = "generate"

    @classmethod
    def of(cls, source: PipelineSource, call: InferenceCall) -> "PlannedGeneration":
        """Measure networks that are built without memory."""
        missing: list[MissingFiles] = []
        found = source.find(missing)
        given = (source.family, source.spec, found, default_device(), source.dtype)
        pipeline = Pipeline.from_found(*given, empty=True)
        components = {
            name: planned_component(name, network, has_lora=False)
            for name, network in pipeline.components.items()
            if isinstance(network, nn.Module)
        }
        kept = {k: kept_weights(one, found.keepers) for k, one in components.items()}
        absent = [f"{error.where}: {error.what}" for error in missing]
        return cls(source.config, call, components, kept, absent)

    def page(self) -> list[str]:
        """Return what would be loaded and made on a page of text."""
        inputs, sampling = self.call.inputs, self.call.sampling
        sides = [inputs.get(side) for side in ("width", "height", "num_frames")]
        size = " x ".join(str(side) for side in sides if side is not None)
        steps = number_of(sampling.steps_taken, "step")
        lines = ["this command makes", f"    {self.config.output}: {size}, {steps}"]
        lines += ["", "from"]
        for name, one in self.components.items():
            words = ", ".join(filter(None, (one.dtype, self.kept[name].words)))
            size_here = as_size(sum(self.kept[name].sizes))
            lines.append(f"    {name}: {size_here} in {words}")
        lines += [f"    LoRA {lora.path}:{lora.scale:g}" for lora in self.config.lora]
        if self.absent:
            lines += ["", "to fetch", *fitted(f"    {line}" for line in self.absent)]
        found = extensions_in_use().answers("dstrain_dry_run", Section, planned=self)
        return lines + [line for _, section in found for line in section.page()]


def generate(config: GenerateConfig) -> None:
    """Generate what a configuration describes; raises DstrainError."""
    config = with_run_options(with_family(config))
    validate(config)
    start(config)


def start(config: GenerateConfig) -> None:
    """Generate from a configuration that is valid, or let a plugin do it."""
    with oom_as_error("generate"), disabling(config.disabled_plugins):
        extensions_in_use().refuse_unheard(config)
        place = generator_of(config)
        if place and config.dry_run:
            raise UsageError("--dry_run", "is for generating one image or video")
        generator = resolve_name(place) if place else generate_one
        generator(config)


def generate_one(config: GenerateConfig) -> None:
    """Generate one image or video, and write it; raises UsageError for a file that is
    there, unless it may be replaced.
    """
    refuse_existing(config, [config.output])
    with open_source(config) as source, naming_flags(config):
        check_output(config.output, source.spec)
        if source.spec.makes_layers:
            others = f"{escape(config.output.stem)}-[0-9]*{config.output.suffix}"
            refuse_existing(config, sorted(config.output.parent.glob(others)))
        arguments = parse_arguments(config, source.spec)
        call = plan_inference(source.spec, arguments)
        check_used(config, source.spec, call.plan.used_inputs)
        check_writable(config.output.parent)
        if config.dry_run:
            print(redacted("\n".join(PlannedGeneration.of(source, call).page())))
            return
        pipeline = source.load()
        steps = call.sampling.steps_taken
        with progress_bar("generate", steps, brief=True) as progress:

            def on_step(number: int, latents: Tensor) -> None:
                progress.update()
                if number + 1 == steps:
                    # Of a video, it takes as long as many steps.
                    retitle(progress, "decode")

            arguments["on_step"] = on_step
            with noticing(config, "--prompt"):
                output = pipeline(**arguments)
        save_image_or_video(output, config.output, description(source, call))
        for path in output_paths(output, config.output):
            print(redacted(f"wrote {path}"))


def refuse_existing(config: GenerateConfig, paths: Iterable[Path]) -> None:
    """Refuse to replace a file without --overwrite."""
    for path in paths:
        if (path.is_file() or path.is_symlink()) and not config.overwrite:
            what = f"{path} already exists and was not modified"
            advice = "give --overwrite to replace it, or another --output"
            raise UsageError("--output", what, advice)


def description(source: PipelineSource, call: InferenceCall) -> dict[str, str]:
    """Return what an image was generated from, by name: for whoever finds the file.

    Files are named without their folders, and secrets are left out.
    """
    sampling = call.sampling
    names = dict.fromkeys(named_models(source.family, source.models).values())
    trained = [path.name for files in source.weights.values() for path in files.paths]
    spec = source.spec
    about = {
        "prompt": call.inputs.get("prompt", ""),
        "negative_prompt": call.inputs.get("negative_prompt", ""),
        "seed": sampling.seed,
        "num_inference_steps": sampling.num_inference_steps,
        "guidance_scale": f"{sampling.guidance_scale:g}",
        "model": ", ".join([f"{spec.family} {spec.variant}", *names, *trained]),
        "LoRA": ", ".join(
            f"{lora.path.name}:{lora.scale:g}" for lora in source.config.lora
        ),
    }
    if spec.samplers:
        about["sampler"] = sampling.sampler
    if sampling.denoising_strength is not None:
        about["denoising_strength"] = f"{sampling.denoising_strength:g}"
    if NEGATIVE not in call.plan.task.branches:
        del about["negative_prompt"]
    return {name: redacted(str(text)) for name, text in about.items() if text != ""}
