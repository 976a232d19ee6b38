"""What a LoRA file of ours says of how it was made, and what of that is another where it is used."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.components import Files
from dstrain.resume import DECISIVE

if TYPE_CHECKING:
    from dstrain.pipeline import Pipeline
    from dstrain.setup import Setup

RECIPE = ("task", "batch_size", "gradient_accumulation_steps", *DECISIVE)
"""Flags that a file tells of the run that made it: those that decide its numbers."""
BLOCKS, BLOCK_BYTES = 64, 4096


def made_by(setup: "Setup", files: Files, content: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What a run says in its LoRA's header: `base` (see `base_of`), its configuration, and the flags that decide."""
    told = {name: getattr(setup.config, name) for name in RECIPE}
    preset = {"preset_lora": setup.preset.digest} if setup.preset is not None else {}
    return {
        "base": base_of(files),
        "config": dict(content),
        "recipe": {**told, "steps": steps, **preset},
    }


def base_of(files: Files) -> dict[str, str]:
    """The weights that a LoRA was trained on: their model id, if they have one, and their digest."""
    return {**({"model_id": files.model_id} if files.model_id else {}), "digest": sampled(files.paths)}


def sampled(paths: Sequence[Path]) -> str:
    """A digest of files, whatever their names, that reads little of them: each one's size and 64 blocks of 4 KiB.

    It tells models apart, for in a model trained further every weight is another; it does not notice damage.
    """
    parts = []
    for path in paths:
        size = path.stat().st_size
        whole = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(size - BLOCK_BYTES, 0) // (BLOCKS - 1))
                whole.update(file.read(BLOCK_BYTES))
        parts.append(whole.hexdigest())
    return hashlib.sha256("".join(sorted(parts)).encode()).hexdigest()[:40]


def differences(path: Path, header: Mapping[str, str], pipeline: "Pipeline", component: str) -> list[str]:
    """Lines on what a LoRA was trained for and on that is another in this pipeline; its family is the same."""
    lines = []
    variant = header.get("variant", pipeline.wiring.variant)
    if variant != pipeline.wiring.variant:
        lines.append(f"{path}: was trained for variant {variant}, and this is {pipeline.wiring.variant}")
    try:
        base = json.loads(header.get("base", "{}"))
        digest, name = base.get("digest"), base.get("model_id", "other files")
    except (ValueError, AttributeError, RecursionError):
        digest, name = None, ""
    files = pipeline.files.get(component)
    if digest is not None and files is not None and digest != sampled(files.paths):
        here = files.model_id or files.paths[0].name
        lines.append(f"{path}: was trained on other weights of {component} ({name}) than these ({here})")
    return lines
