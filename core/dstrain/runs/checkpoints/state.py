"""Checkpoints: whole components to use elsewhere, and the training state from which a
run resumes bit for bit.

    OUTPUT/states/step-STEP/trainable.safetensors, optimizer.safetensors, state.json
    OUTPUT/states/step-STEP/ema.safetensors  with --ema_decay: the average of what is trained
    OUTPUT/states/step-STEP/record.json  sha256 of each, written last: the commit point

A state is built under a temporary name and renamed whole. Nothing is pickled.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dstrain.errors import StateError, UsageError
from dstrain.runs.checkpoints.directory import EMA, FILES, RECORD
from dstrain.runs.checkpoints.saved_states import FORMAT, damage
from dstrain.storage import read_tensors, sha256, take_part, write_json, write_tensors
from dstrain.storage.tensor_writer import is_divided
from dstrain.storage.whole_folders import replacing_folder


@dataclass(frozen=True)
class TrainingState:
    """All that a run needs to resume, at an optimizer-step boundary.

    Which samples come next follows from the step.
    """

    step: int
    trainable: Mapping[str, Tensor]
    """Parameter name -> its tensor."""
    optimizer: dict[str, Any]
    """The optimizer's `state_dict()`: tensors, plain values, and lists, tuples and
    dictionaries of these.
    """
    scheduler: dict[str, Any]
    """The learning-rate scheduler's `state_dict()`."""
    config_digest: str
    """The digest of the options that a resumed run must have in common."""
    versions: Mapping[str, str]
    """Library -> its version."""
    content: Mapping[str, str] = field(default_factory=dict)
    """Digests of the dataset, by what they are of."""
    average: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameter name -> its average over the steps; empty where none is kept."""
    average_facts: Mapping[str, str] = field(default_factory=dict)
    """The decay and the steps of the average; empty where none is kept."""
    position: Mapping[str, Any] = field(default_factory=dict)
    """The fields of a `batching.Position` shortly before the next step's samples, which
    saves the walk to them; may be empty.
    """
    observers: Mapping[str, Any] = field(default_factory=dict)
    """What observers of plugins keep, by name; may be empty."""


def save_state(folder: Path, state: TrainingState) -> None:
    """Commit the state as this folder; a state there before stays until the new one is
    in place. Raises SystemFault.
    """
    optimizer, rest = _packed(state)
    with replacing_folder(folder) as building:
        write_tensors(building / "trainable.safetensors", state.trainable, {})
        write_tensors(building / "optimizer.safetensors", optimizer, {})
        write_json(building / "state.json", rest)
        names = [*FILES]
        if state.average_facts:
            write_tensors(building / EMA, state.average, {})
            names.append(EMA)
        digests = {name: sha256(building / name) for name in names}
        write_json(building / RECORD, {**FORMAT, "sha256": digests})


def take_part_in_saving(state: TrainingState) -> None:
    """Give this process's rows of the state's tensors to the one in `save_state`."""
    optimizer, _ = _packed(state)
    take_part(state.trainable)
    take_part(optimizer)
    take_part(state.average)


def _packed(state: TrainingState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of optimizer and schedule by name, and the rest as JSON."""
    tensors: dict[str, Tensor] = {}
    rest = {
        "step": state.step,
        "config_digest": state.config_digest,
        "versions": state.versions,
        "content": state.content,
        "scheduler": pack(state.scheduler, tensors, "scheduler"),
        "optimizer": pack(state.optimizer, tensors, "optimizer"),
    }
    if state.average_facts:
        rest["average_facts"] = state.average_facts
    if state.position:
        rest["position"] = state.position
    if state.observers:
        rest["observers"] = state.observers
    return tensors, rest


def load_state(
    folder: Path,
    read: Callable[[Path], dict[str, Tensor]] = lambda path: read_tensors(path)[0],
) -> TrainingState:
    """Read a state back, bit for bit, tensors on the CPU; raises StateError if a byte
    of it is missing or damaged.

    read: reads the tensors of a file, all of each by default.
    """
    reason = damage(folder)
    if reason:
        raise StateError(folder, reason)
    rest = json.loads((folder / "state.json").read_bytes())
    optimizer = read(folder / "optimizer.safetensors")
    for name in ("scheduler", "optimizer"):
        rest[name] = unpack(rest[name], optimizer)
    trainable = read(folder / "trainable.safetensors")
    if "average_facts" in rest:
        rest["average"] = read(folder / EMA)
    return TrainingState(trainable=trainable, **rest)


def refuse_unwritable(name: str, state: Mapping[str, Any]) -> None:
    """Raise UsageError for an optimizer whose `state_dict()` a file cannot hold."""
    try:
        pack(state, {}, "optimizer")
    except StateError as error:
        what = f"the state of {name} cannot be saved: {error.what}"
        raise UsageError("--optimizer", what) from error


def pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Put tensors aside under names that begin with `name`; return JSON that keeps
    tuples and keys that are numbers.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    # Subclasses are of layouts that the file does not know.
    if type(value) in (Tensor, nn.Parameter) or is_divided(value):
        tensors[name] = value
        return {"tensor": name}
    kind = type(value).__name__
    # JSON would turn keys that are numbers into texts, so pairs are kept.
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        pairs = []
        for key, item in value.items():
            pairs.append([key, pack(item, tensors, f"{name}/{key}")])
        return {"dict": pairs}
    if kind in ("list", "tuple"):
        items = []
        for index, item in enumerate(value):
            items.append(pack(item, tensors, f"{name}/{index}"))
        return {kind: items}
    raise StateError(name, f"a value of type {kind} cannot be stored in a state")


def unpack(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `pack` was given, of its JSON and the tensors by name."""
    if not isinstance(form, dict):
        return form
    # One entry: the kind of the value, and its content.
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in content}
    items = [unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
