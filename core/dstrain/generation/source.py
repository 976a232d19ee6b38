"""Open the pipeline of a generation."""

import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dstrain.config import CONFIG, LoraFile, read_resolved, split_commas
from dstrain.config.lora_file import parse_preset
from dstrain.config.options import GenerateConfig
from dstrain.console import shell_command
from dstrain.errors import MissingFiles, StateError, UsageError, first_few
from dstrain.generation.inputs import flag_for, input_names
from dstrain.graph import PipelineSpec
from dstrain.graph.keepers import AS_LOADED, Keepers
from dstrain.lora import check_lora_file
from dstrain.models import (
    DTYPES,
    Files,
    Found,
    ModelConfig,
    component_digests,
    components_of,
    default_device,
    precision,
    write_toy,
)
from dstrain.models.component_files import saved_weights
from dstrain.models.device import attention_backend
from dstrain.models.naming import model_configs
from dstrain.pipeline import (
    Pipeline,
    choose_variant,
    find_preset,
    keepers_for_inference,
    start_input,
    with_overrides,
)
from dstrain.pipeline.keeping import with_presets
from dstrain.pipeline.sampling import find_for_inference
from dstrain.pipeline.variant_choice import score_inputs
from dstrain.registry import ModelFamily, load_family
from dstrain.storage import RunFiles, verify_file
from dstrain.storage.file_memory import ModelDigests


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
        found = find_for_inference(
            self.family, self.spec, self.models, self.keepers, absent
        )
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
        pipeline = Pipeline.from_found(
            self.family, self.spec, self.find(), default_device(), self.dtype
        )
        for lora in self.config.lora:
            pipeline.load_lora(
                lora.path, lora.scale, lora.component, lora.alpha, lora.skip_missing
            )
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
    trained = _Trained.by(config.run, family)
    components = components_of(family)
    loras = tuple(lora.of(components) for lora in config.lora)
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


@dataclass(frozen=True)
class _Trained:
    """What a run trained."""

    variant: str | None = None
    lora: tuple[LoraFile, ...] = ()
    """Its newest LoRA files."""
    full: Mapping[str, Files] = field(default_factory=dict)
    """Component -> its newest weights, where it was trained in full."""
    preset: Mapping[str, LoraFile] = field(default_factory=dict)
    """Component -> the LoRA that was merged into its weights, unless it is in `full`."""

    @classmethod
    def by(cls, run: Path | None, family: ModelFamily) -> "_Trained":
        """Return what a run trained; nothing without a run."""
        if run is None:
            return cls()
        files = RunFiles.read(run)
        newest = files.newest_weights()
        if not newest:
            raise _without_weights(files)
        variant = ""
        loras = []
        full = {}
        for path in newest:
            header = verify_file(path)
            variant = variant or header["variant"]
            if "base" in header:  # what a LoRA was trained on
                loras.append(LoraFile(path))
            else:
                component = header["component"]
                full[component] = saved_weights(family, component, path)
        preset = _preset_of(read_resolved(run), family, variant, full)
        return cls(variant, tuple(loras), full, preset)


def _without_weights(files: RunFiles) -> StateError:
    """Return the error of a run none of whose weights are there, with the command that
    writes them if it has saved a state.
    """
    missing = files.missing_weights()
    what = "this run has not saved any weights"
    if missing:
        what = f"the weights that this run saved are gone: {first_few(missing)}"
    if not files.committed:
        return StateError(files.folder, what)
    words = ["dstrain", "--config", str(files.folder / CONFIG), "--resume"]
    advice = f"resuming from its last state writes weights again; run: {shell_command(words)}"
    return StateError(files.folder, what, advice)


def _preset_of(
    recorded: Mapping[str, Any],
    family: ModelFamily,
    variant: str,
    full: Collection[str],
) -> dict[str, LoraFile]:
    """Return the components that a run merged a preset into, by its configuration, each
    with its file: but for those that it trained in full, which have it in their weights.
    """
    path = recorded.get("preset_lora_path")
    named = recorded.get("preset_lora_model")
    # An older run may have merged it without recording into what.
    into = split_commas(named) or tuple(full)
    if not path or (into and set(into) <= set(full)):
        return {}
    file = parse_preset(path)
    if file.training_only:
        return {}
    preset = find_preset(file, named, family, family.spec(variant))
    return {
        name: replace(preset.file, component=name)
        for name in preset.components
        if name not in full
    }


def check_used(
    config: GenerateConfig,
    spec: PipelineSpec,
    used: Collection[str],
) -> None:
    """Refuse an input of the command line that is not among those that inference uses."""
    for name in input_names(config):
        if name in used:
            continue
        why = f"variant {spec.variant} does not use it"
        if name in spec.cfg_inputs.values():
            why = "guidance is off; turn it on with --guidance_scale above 1"
        elif name == start_input(spec):
            why = "nothing starts from it; give --denoising_strength as well"
        raise UsageError(flag_for(config, name), f"has no effect: {why}")
