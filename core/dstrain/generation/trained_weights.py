"""Find what a run trained, to generate with it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstrain.config import CONFIG, LoraFile, read_resolved, split_commas
from dstrain.config.lora_file import parse_preset
from dstrain.console import shell_command
from dstrain.errors import StateError, first_few
from dstrain.models import Files
from dstrain.models.component_files import saved_weights
from dstrain.pipeline import find_preset
from dstrain.registry import ModelFamily
from dstrain.storage import RunFiles, verify_file


@dataclass(frozen=True)
class Trained:
    """What a run trained."""

    variant: str | None = None
    lora: tuple[LoraFile, ...] = ()
    """Its newest LoRA files."""
    full: Mapping[str, Files] = field(default_factory=dict)
    """Component -> its newest weights, where it was trained in full."""
    preset: Mapping[str, LoraFile] = field(default_factory=dict)
    """Component -> the LoRA that was merged into its weights, unless it is in `full`."""

    @classmethod
    def by(cls, run: Path | None, family: ModelFamily) -> "Trained":
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
    left = [name for name in preset.components if name not in full]
    return {name: replace(preset.file, component=name) for name in left}
