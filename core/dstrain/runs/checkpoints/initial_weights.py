"""--resume_from_checkpoint: saved weights of what is trained, as the start of a new
run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dstrain.errors import StateError, UsageError
from dstrain.lora.keys import KEY
from dstrain.models.components import Files
from dstrain.models.locate import Found
from dstrain.models.weights import find_weights
from dstrain.runs.checkpoints.state import RECORD
from dstrain.runs.setup import Setup
from dstrain.storage.safetensors import verify_file

FLAG = "--resume_from_checkpoint"


@dataclass(frozen=True)
class InitialWeights:
    """Files by component: `full` hold all its weights, `lora` its LoRA layers."""

    full: Mapping[str, Path]
    lora: Mapping[str, Path]

    def replacing_files(self, found: Found) -> Found:
        """Return what was found, with these weights in place of the published ones."""
        return replace(
            found,
            files={
                **found.files,
                **{name: Files((path,)) for name, path in self.full.items()},
            },
        )


def initial_weights(setup: Setup, found: Found) -> InitialWeights:
    """Check the files that the flag names, one per component, before any model is
    loaded.

    Raises StateError for one that is absent, damaged, of something else than what is
    trained, or of another configuration; names and shapes are checked when they are
    loaded.
    """
    full: dict[str, Path] = {}
    lora: dict[str, Path] = {}
    for path in _paths(setup.config.resume_from_checkpoint):
        header = _read_header(path, setup)
        component, kind = header["component"], lora if _is_lora(path) else full
        if component in full or component in lora:
            raise UsageError(
                FLAG,
                f"names two files of {component}: {(full | lora)[component]} and {path}",
            )
        _check_kind(path, component, kind is lora, setup)
        if kind is full:
            _check_preset(path, component, setup)
            _check_configuration(path, header, found.configs.get(component, {}))
        elif setup.config.lora_checkpoint is not None:
            raise UsageError(
                "--lora_checkpoint",
                f"fills the same LoRA layers as {FLAG} {path}; give one of them",
            )
        kind[component] = path
    return InitialWeights(full, lora)


def _paths(given: Path | None) -> list[Path]:
    """Return the files named, comma-separated if several; a file whose name has a comma
    is one file.
    """
    if given is None or given.exists():
        return [] if given is None else [given]
    return [Path(part.strip()) for part in str(given).split(",") if part.strip()]


def _read_header(path: Path, setup: Setup) -> dict[str, str]:
    if not path.is_file():
        is_state = path.is_dir() and (path / RECORD).exists()
        what = "is a folder" if path.is_dir() else "no such file"
        raise StateError(
            str(path),
            f"{what}; {FLAG} takes weights files that a run saved",
            *([f"to resume from a state: --resume {path}"] if is_state else []),
        )
    header = verify_file(path)
    if "component" not in header:
        raise StateError(
            str(path),
            "its header names no component",
            "give model files with --model_paths",
        )
    if header.get("family") != setup.spec.family:
        raise StateError(
            str(path),
            f"is of family {header.get('family')}, and this is {setup.spec.family}",
        )
    return header


def _is_lora(path: Path) -> bool:
    """Whether a file has matrices of LoRA layers, in any program's names; an alpha may
    be a network's own.
    """
    hits = (KEY.fullmatch(name) for name in find_weights((path,)))
    return any(hit and (hit["ab"] or hit["way"] or hit["embedding"]) for hit in hits)


def _check_preset(path: Path, component: str, setup: Setup) -> None:
    """Refuse a preset for weights that a run trained in full: they have the preset of
    that run in them.
    """
    if setup.preset is not None and setup.preset.component == component:
        what = f"is not merged into {component}, all of which {FLAG} {path} takes the place of"
        raise UsageError(
            "--preset_lora_path",
            what,
            "leave it out: a preset is in the weights that were trained on it",
            "if these were trained without it, "
            f"give them with --model_paths in the place of the published {component}",
        )


def _check_kind(path: Path, component: str, is_lora: bool, setup: Setup) -> None:
    """Refuse weights of what is not trained, and LoRA layers where all is trained or
    the other way round.
    """
    layers = {lora_config.component for lora_config in setup.trainables.lora}
    if component not in setup.trainables.components:
        trained = ", ".join(setup.trainables.components)
        raise StateError(
            str(path), f"is of {component}, and what is trained is {trained}"
        )
    if is_lora and component not in layers:
        what = f"holds LoRA layers of {component}, which is trained in full"
        raise StateError(
            str(path), what, f"train LoRA layers: --lora_base_model {component}"
        )
    if not is_lora and component in layers:
        what = f"holds all of {component}, of which LoRA layers are trained"
        raise StateError(
            str(path),
            what,
            f"give it with --model_paths, in the place of the published {component}",
        )


def _check_configuration(
    path: Path, header: Mapping[str, str], want: Mapping[str, object]
) -> None:
    have = json.loads(header.get("config", "{}"))
    expected = json.loads(json.dumps(dict(want)))
    names = [
        name
        for name in {**expected, **have}
        if have.get(name) != expected.get(name) and not name.startswith("_")
    ]
    if names:
        words = [
            f"{name}: there {have.get(name)}, this run {expected.get(name)}"
            for name in names
        ]
        raise StateError(
            str(path),
            f"is of another configuration: {', '.join(names)} differ",
            "; ".join(words),
        )
