"""Open the pipeline of a generation."""

import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dstrain.config import LoraFile
from dstrain.config.options import GenerateConfig
from dstrain.errors import MissingFiles, UsageError
from dstrain.generation.inputs import flag_for, input_names
from dstrain.generation.trained_weights import Trained
from dstrain.graph import PipelineSpec
from dstrain.graph.keepers import AS_LOADED, Keepers
from dstrain.lora import check_lora_file
from dstrain.models import (
    DTYPES,
    Files,
    Found,
    ModelConfig,
    components_of,
    default_device,
    precision,
    write_toy,
)
from dstrain.models.device import attention_backend
from dstrain.models.naming import model_configs
from dstrain.models.needed_components import component_digests
from dstrain.pipeline import (
    Pipeline,
    choose_variant,
    keepers_for_inference,
    start_input,
    with_overrides,
)
from dstrain.pipeline.inference_plan import find_for_inference
from dstrain.pipeline.keeping import with_presets
from dstrain.pipeline.variant_choice import score_inputs
from dstrain.registry import ModelFamily, load_family
from dstrain.storage.file_digests import ModelDigests


@dataclass(frozen=True)
class PipelineSource:
    """A pipeline that a configuration names, before it is loaded."""

    config: GenerateConfig
    family: ModelFamily
    spec: PipelineSpec
    models: tuple[ModelConfig, ...]
    """The files of its components."""
    weights: Mapping[str, Files]
    """Components that the run of --run trained in full, by name."""
    keepers: Keepers = AS_LOADED
    """How weights are kept."""
    presets: Mapping[str, LoraFile] = field(default_factory=dict)
    """Component -> a LoRA file that is merged into its weights as they are read."""

    def find(self, absent: list[MissingFiles] | None = None) -> Found:
        """Find the files of every component that inference loads; see `find_for_inference`."""
        given = (self.family, self.spec, self.models, self.keepers)
        found = find_for_inference(*given, absent)
        files = with_presets({**found.files, **self.weights}, self.presets)
        return replace(found, files=files)

    def digests(self) -> dict[str, str]:
        """Return the digest of each component's files and of its configuration."""
        digests = ModelDigests()
        found = component_digests(self.find(), digests)
        digests.save()
        return found

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the components, in which model_fn computes."""
        return DTYPES[precision(self.config.mixed_precision, default_device())]

    def load(self) -> Pipeline:
        """Load the pipeline and add the LoRAs."""
        given = (self.family, self.spec, self.find(), default_device(), self.dtype)
        pipeline = Pipeline.from_found(*given)
        for one in self.config.lora:
            how = (one.scale, one.component, one.alpha, one.skip_missing)
            pipeline.load_lora(one.path, *how)
        return pipeline


@contextmanager
def open_source(
    config: GenerateConfig, columns: Collection[str] = ()
) -> Iterator[PipelineSource]:
    """Choose the variant by its flag, or by the names of the inputs, which are those of
    the command line and `columns`; a toy, if asked for, is written to a temporary folder.

    Raises StateError for a LoRA file that does not exist.
    """
    attention_backend()  # refused before anything is downloaded
    family = load_family(config.model, config.disabled_plugins)
    trained = Trained.by(config.run, family)
    loras = tuple(lora.of(components_of(family)) for lora in config.lora)
    variant = config.variant or trained.variant
    config = replace(config, variant=variant, lora=loras)
    for lora in (*trained.lora, *config.lora):
        check_lora_file(lora.path)
    models = model_configs(config, family, offline=config.dry_run)
    score = score_inputs({*input_names(config), *columns})
    variant = choose_variant(family, config.variant, models, score, config.toy)
    spec = with_overrides(family.spec(variant), family, config)
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as folder:
        toy = write_toy(family, spec.variant, Path(folder)) if config.toy else ()
        models = (*toy, *models)
        keepers = keepers_for_inference(config, family, spec, models)
        config = replace(config, lora=(*trained.lora, *config.lora))
        yield PipelineSource(
            config, family, spec, models, trained.full, keepers, trained.preset
        )


def check_used(
    config: GenerateConfig, spec: PipelineSpec, used: Collection[str]
) -> None:
    """Refuse an input of the command line that is not among those that inference uses."""
    for name in input_names(config):
        if name in used:
            continue
        why = f"variant {spec.variant} does not use it"
        if name in spec.cfg_inputs.values():
            why = f"guidance is off; turn it on with --guidance_scale above {spec.no_guidance:g}"
        elif name == start_input(spec):
            why = "nothing starts from it; give --denoising_strength as well"
        raise UsageError(flag_for(config, name), f"has no effect: {why}")
