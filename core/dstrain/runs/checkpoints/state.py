"""Checkpoints: whole components to use elsewhere, and the training state from which a
run resumes bit for bit.

    OUTPUT/states/step-STEP/trainable.safetensors, optimizer.safetensors, state.json
    OUTPUT/states/step-STEP/ema.safetensors  with --ema_decay: the average of what is trained
    OUTPUT/states/step-STEP/record.json  sha256 of each, written last: the commit point

A state is built under a temporary name and renamed whole. Nothing is pickled.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from dstrain.console import get_logger
from dstrain.errors import StateError, UsageError
from dstrain.models import NATIVE, to_checkpoint
from dstrain.models.formats import CheckpointFormat
from dstrain.runs.checkpoints.directory import (
    EMA,
    FILES,
    RECORD,
    STATE_FILES,
    STATES,
    states,
    step_of,
)
from dstrain.storage import read_tensors, sha256, take_part, write_json, write_tensors
from dstrain.storage.tensor_writer import is_divided, whole
from dstrain.storage.whole_folders import remove_folder, replacing_folder

logger = get_logger(__name__)


FORMAT = MappingProxyType({"format": "dstrain-state", "version": 1})


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


def save_full(
    path: Path,
    module: nn.Module,
    config: Mapping[str, Any],
    metadata: Mapping[str, str],
    checkpoint_format: CheckpointFormat = NATIVE,
) -> None:
    """Write one component's weights, by default named as its own `save_pretrained`
    would; `config` is kept as JSON in the header.

    Raises SystemFault.
    """
    header = {"format": "pt", **metadata, "config": json.dumps(config, sort_keys=True)}
    tensors = published(module, checkpoint_format)
    write_tensors(path, tensors, header, checksum=True)


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
        "scheduler": _pack(state.scheduler, tensors, "scheduler"),
        "optimizer": _pack(state.optimizer, tensors, "optimizer"),
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
        rest[name] = _unpack(rest[name], optimizer)
    trainable = read(folder / "trainable.safetensors")
    if "average_facts" in rest:
        rest["average"] = read(folder / EMA)
    return TrainingState(trainable=trainable, **rest)


def saved_facts(folder: Path) -> Mapping[str, Any]:
    """Read what a state has beside tensors, whose files are not looked at; nothing where
    that is damaged or missing.
    """
    path = folder / "state.json"
    try:
        digest = json.loads((folder / RECORD).read_bytes())["sha256"][path.name]
        if sha256(path) != digest:
            return {}
        facts: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return facts


def damage(folder: Path) -> str:
    """Say why a state cannot be used, or return '' when its record and every digest
    agree.
    """
    try:
        record = json.loads((folder / RECORD).read_bytes())
        digests = record.pop("sha256")
        if record != FORMAT or digests.keys() - {EMA} != {*FILES}:
            return f"{RECORD} is of another format: {record}"
        wrong = [name for name in digests if sha256(folder / name) != digests[name]]
    except FileNotFoundError as error:
        return f"is incomplete: {Path(error.filename).name} is missing"
    except Exception as error:  # a damaged one may be anything
        return f"{RECORD} cannot be used: {error!r}"
    if wrong:
        return f"is damaged: the sha256 of {', '.join(wrong)} is not the recorded one"
    return ""


def newest_state(output: Path) -> Path:
    """Return the newest state that is whole, with a warning for each that is passed
    over.

    Raises StateError when there is none.
    """
    for folder in states(output):
        reason = damage(folder)
        if not reason:
            return folder
        logger.warning(f"skipped: {folder}: {reason}")
    raise StateError(
        output,
        "contains no intact state to resume from",
        "put back an intact one, or start over with --overwrite in place of --resume",
    )


def prune_states(output: Path, keep: int, step: int, listed: Collection[str]) -> None:
    """Remove what is older than the newest `keep` states up to this step, but no other
    files in their folders, and no folder that is a link.

    A state beyond the step is one that could not be loaded.

    Args:
        output: The folder with the folder of states.
        keep: How many states stay.
        step: The run's step.
        listed: Paths below `output` that runs wrote. Only states made of these count.
    """
    done = []
    for folder in states(output):
        files = {path.name for path in folder.iterdir()}.intersection(STATE_FILES)
        paths = {f"{STATES}/{folder.name}/{name}" for name in files}
        if step_of(folder) <= step and paths <= {*listed} and not folder.is_symlink():
            done.append(folder)
    for folder in done[keep:]:
        if {path.name for path in folder.iterdir()} <= {*STATE_FILES}:
            # The folder loses its name first, so that no half of a state is ever seen.
            remove_folder(folder)
            continue
        for name in STATE_FILES:
            (folder / name).unlink(missing_ok=True)


def refuse_unwritable(name: str, state: Mapping[str, Any]) -> None:
    """Raise UsageError for an optimizer whose `state_dict()` a file cannot hold."""
    try:
        _pack(state, {}, "optimizer")
    except StateError as error:
        what = f"the state of {name} cannot be saved: {error.what}"
        raise UsageError("--optimizer", what) from error


def _pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
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
            pairs.append([key, _pack(item, tensors, f"{name}/{key}")])
        return {"dict": pairs}
    if kind in ("list", "tuple"):
        items = []
        for index, item in enumerate(value):
            items.append(_pack(item, tensors, f"{name}/{index}"))
        return {kind: items}
    raise StateError(name, f"a value of type {kind} cannot be stored in a state")


def _unpack(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(form, dict):
        return form
    # One entry: the kind of the value, and its content.
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def published(
    module: nn.Module, checkpoint_format: CheckpointFormat
) -> dict[str, Tensor]:
    """Return the module's weights by the names of a format, or of its published files.

    transformers names the layers of some models otherwise in memory, and leaves out
    weights tied to another. Weights whose rows lie on several processes stay so where
    the names are the network's own; else every process puts each together.
    """
    state: dict[str, Tensor] = module.state_dict()
    tied = getattr(module, "all_tied_weights_keys", None)
    if checkpoint_format is NATIVE and tied is None:
        return state
    state = {name: whole(value).cpu() for name, value in state.items()}
    untied = {name: value for name, value in state.items() if name not in (tied or ())}
    if checkpoint_format is not NATIVE:
        return to_checkpoint(checkpoint_format, untied)
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(module, untied)
    return reverted
