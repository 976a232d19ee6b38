"""Say what a generation would load and make, without loading it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dstrain.config import as_size
from dstrain.config.options import GenerateConfig
from dstrain.console import fitted, number_of
from dstrain.errors import MissingFiles
from dstrain.generation.pipeline_source import PipelineSource
from dstrain.models import default_device
from dstrain.pipeline import Pipeline
from dstrain.pipeline.inference_plan import InferenceCall
from dstrain.pipeline.planned_weights import (
    KeptWeights,
    PlannedComponent,
    kept_weights,
    planned_component,
)
from dstrain.registry import Section, extensions_in_use


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
