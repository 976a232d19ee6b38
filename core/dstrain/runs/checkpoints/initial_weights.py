"""Start a run from saved weights of what is trained: --resume_from_checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

from dstrain.config import LoraFile, split_commas
from dstrain.errors import StateError, UsageError
from dstrain.lora import is_lora_file
from dstrain.models import Found
from dstrain.models.component_files import saved_weights
from dstrain.models.configs import differing_entries
from dstrain.models.weights import find_weights
from dstrain.runs.setup import Setup
from dstrain.storage import verify_file

FLAG = "--resume_from_checkpoint"


def initial_weights(setup: Setup, found: Found) -> tuple[Found, list[LoraFile]]:
    """Return what was found, with the weights that the flag names in place of published
    ones, and the LoRA files that it names.

    Raises StateError, before any model is loaded, for a file that is absent, damaged, of
    something else than what is trained, or of another configuration; names and shapes
    are checked when they are loaded.
    """
    files = dict(found.files)
    loras: list[LoraFile] = []
    components: set[str] = set()
    for name in split_commas(str(setup.config.resume_from_checkpoint or "")):
        path = Path(name)
        header = _read_header(path, setup)
        component = header["component"]
        if component in components:
            raise UsageError(FLAG, f"names two files for {component}; one is {path}")
        components.add(component)
        is_lora = is_lora_file(find_weights((path,)), header)
        _check_trained(path, component, is_lora, setup)
        if not is_lora:
            if setup.preset is not None and component in setup.preset.components:
                # They have the preset of the run that trained them in them.
                what = f"cannot be merged into {component}: {FLAG} {path} replaces it"
                raise UsageError("--preset_lora_path", what, "leave it out")
            recorded = json.loads(header.get("config", "{}"))
            used = found.configs.get(component, {})
            if differing := differing_entries(recorded, used):
                words = [
                    f"{key}: {one}, this run {other}"
                    for key, (one, other) in differing.items()
                ]
                what = f"has a different configuration: {'; '.join(words)}"
                raise StateError(path, what)
            files[component] = saved_weights(setup.family, component, path)
        elif setup.config.lora_checkpoint is None:
            loras.append(LoraFile(path, component=component))
        else:
            what = f"fills the same LoRA layers as {FLAG} {path}; give one of them"
            raise UsageError("--lora_checkpoint", what)
    return replace(found, files=files), loras


def _read_header(path: Path, setup: Setup) -> dict[str, str]:
    if not path.is_file():
        raise StateError(path, f"is no file; {FLAG} takes weights that a run saved")
    header = verify_file(path)
    family = header.get("family")
    if family != setup.spec.family:
        raise StateError(path, f"is for family {family}, not for {setup.spec.family}")
    if not header.get("component"):
        what = "its header does not name its component, as that of saved weights does"
        raise StateError(path, what, "a LoRA file can be given with --lora_checkpoint")
    return header


def _check_trained(path: Path, component: str, is_lora: bool, setup: Setup) -> None:
    """Refuse weights of what is not trained, and LoRA layers where all is trained or
    the other way round.
    """
    layers = {one.component for one in setup.trainables.lora}
    kinds = {True: "LoRA layers", False: "all"}
    trained = [
        f"{kinds[name in layers]} of {name}" for name in setup.trainables.components
    ]
    content = f"{kinds[is_lora]} of {component}"
    if content not in trained:
        what = f"contains {content}, but this run trains {', '.join(trained)}"
        raise StateError(path, what)
