"""Resume exactly: what a state holds, and what a resumed run must have in common."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dstrain.config.schema import ENDING_AT_LAST_STEP, options_affecting
from dstrain.config.serialize import CONFIG
from dstrain.errors import StateError
from dstrain.runs.checkpoints.state import RECORD, TrainingState, states
from dstrain.storage.hashing import hash_json, sha256

if TYPE_CHECKING:
    from dstrain.runs.job import TrainingRun


def data_fingerprint(run: "TrainingRun") -> dict[str, str]:
    """Return digests of the data: the metadata's bytes, and the sizes of the files it
    names.

    Sizes, because reading every image would cost more than it saves. Stage 2 has no
    files, and compares values of its cache by their keys.
    """
    if run.cache_info is not None:
        return {"metadata": run.cache_info.metadata_sha256}
    dataset, size = run.setup.dataset, cache(os.path.getsize)
    used = {
        inputs: sorted(run.setup.plan(inputs).used_inputs)
        for inputs in {frozenset(row) for row in dataset.rows}
    }
    sizes = [
        [size(file) for name in used[frozenset(row)] for file in row[name].files]
        for row in dataset.rows
    ]
    return {
        "metadata": sha256(dataset.table.path),
        "files (by their sizes)": hash_json("sizes", sizes),
    }


def check_state_named(path: Path) -> None:
    """Raise StateError, before anything is loaded, if --resume names something else
    than a folder with a state.
    """
    if not path.is_dir():
        what = (
            "is a file, and a state is a folder" if path.exists() else "no such folder"
        )
        raise StateError(
            str(path),
            what,
            "--resume takes auto, or a folder states/step-STEP of an earlier run",
        )
    if not (path / RECORD).exists() and (inside := states(path)):
        raise StateError(
            str(path),
            "is no state, but holds some",
            f"the newest is --resume {inside[0]}",
        )


def training_state(
    run: "TrainingRun", fingerprint: str, content: Mapping[str, str]
) -> TrainingState:
    """Return what a run needs to resume exactly.

    There is no generator state, since every draw is keyed by its place.
    """
    tensors = {
        name: parameter.detach()
        for name, parameter in run.module.trained.parameters.items()
    }
    optimizer = getattr(run.optimizer, "optimizer", run.optimizer)
    return TrainingState(
        step=run.step,
        trainable=tensors,
        optimizer=optimizer.state_dict(),
        scheduler=run.lr_scheduler.state_dict(),
        config_digest=fingerprint,
        versions=run.setup.versions,
        content=content,
    )


@torch.no_grad()
def load_training_state(
    run: "TrainingRun",
    state: TrainingState,
    fingerprint: str,
    content: Mapping[str, str],
) -> None:
    """Put a saved state back, bit for bit; raises StateError if it is of another run,
    or of another dataset.
    """
    if state.config_digest != fingerprint:
        decisive = ", ".join(f"--{name}" for name in options_affecting("training"))
        raise StateError(
            "--resume",
            "the saved run had other settings that decide its numbers",
            *_differing(run),
            f"must be equal: {decisive}, what is trained, the rows",
            "--batch_size x --gradient_accumulation_steps x processes, --mixed_precision, "
            "and for a linear or cosine schedule --num_epochs and --max_steps",
        )
    changed = [
        name
        for name in content
        if state.content.get(name, content[name]) != content[name]
    ]
    if changed:
        what = f"the dataset is not what the saved run read: its {' and its '.join(changed)} changed since"
        raise StateError(
            "--resume",
            what,
            "put it back as it was",
            "or begin a new run from the saved weights: --resume_from_checkpoint FILE",
        )
    parameters = run.module.trained.parameters
    if set(parameters) != set(state.trainable):
        raise StateError(
            "--resume",
            f"the saved run trains {len(state.trainable)} parameters, this one {len(parameters)}",
        )
    shapes = {
        name: (list(state.trainable[name].shape), list(own.shape))
        for name, own in parameters.items()
    }
    others = [
        f"{name}: there {there}, this run {own}"
        for name, (there, own) in shapes.items()
        if there != own
    ]
    if others:
        what = f"{len(others)} of the {len(parameters)} parameters that the saved run trains have other shapes"
        raise StateError("--resume", what, "; ".join(others[:3]))
    for name, parameter in parameters.items():
        parameter.copy_(state.trainable[name])
    getattr(run.optimizer, "optimizer", run.optimizer).load_state_dict(
        dict(state.optimizer)
    )
    run.lr_scheduler.load_state_dict(dict(state.scheduler))
    run.step = state.step


def _differing(run: "TrainingRun") -> list[str]:
    """Return the flags that differ from those of the run whose state is resumed, in one
    line.
    """
    config = asdict(run.setup.config)
    folder = (
        config["output_path"]
        if config["resume"] == "auto"
        else Path(config["resume"]).resolve().parent.parent
    )
    try:
        saved = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return []
    compared = options_affecting("training", "resolved")
    if config["lr_scheduler"] in ENDING_AT_LAST_STEP:
        compared += options_affecting("length")
    names = (name for name in compared if name in saved and saved[name] != config[name])
    words = [
        f"--{name}: there {saved[name]}, this run {config[name]}" for name in names
    ]
    return ["; ".join(words)] if words else []
