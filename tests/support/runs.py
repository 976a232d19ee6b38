"""Runs of the family `tiny`: their configuration, what they write, and runs that stop
on the way.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from dstrain import Batch, ModelConfig, Pipeline, TrainConfig, TrainingModule, run
from dstrain.cache import stored_plans
from dstrain.distributed import ProcessGroup
from dstrain.models import find
from dstrain.runs import open_training_data, prepare
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.state import load_state
from dstrain.runs.resolve import resolve
from dstrain.runs.runner import toy_models
from dstrain.runs.training_run import TrainingRun
from dstrain.storage import hash_json
from safetensors.torch import load_file
from torch import Tensor

from tests.support.family import COMPONENTS, MODEL, build, weights_of, write, write_data

CAPTIONS = ("dog", "", "two dogs on a bridge", "cat", "a", "dog and cat")


def project(folder: Path, **model: Any) -> Path:
    """A model below `model` and a dataset of six rows of two sizes below `data`."""
    write(folder / "model", **model)
    write_data(folder / "data", CAPTIONS, ((16, 16), (16, 24)))
    return folder


def warm_project(folder: Path, **model: Any) -> Path:
    """A project in which this process has trained.

    So processes that are forked from it need not import anything, which would take
    twenty times as long as their steps.
    """
    project(folder, **model)
    with TemporaryDirectory() as output:
        train(folder, output_path=Path(output) / "out", max_steps=1)
    return folder


def project_by_id(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A fresh project as the working directory, with a copy of its model under a model
    id.
    """
    patch.delenv("DSTRAIN_MODEL_BASE_PATH", raising=False)
    patch.delenv("DIFFSYNTH_MODEL_BASE_PATH", raising=False)
    patch.chdir(folder)
    project(folder)
    shutil.copytree("model", "models/Tiny/Tiny")
    return folder


def config(folder: Path, **changes: Any) -> TrainConfig:
    """A run in a project's folder: LoRA on the denoiser unless the flags say otherwise."""
    given: dict[str, Any] = {
        "model": "tiny",
        "dataset_base_path": folder / "data",
        "output_path": folder / "out",
        "learning_rate": 1e-2,
        "lora_rank": 2,
    }
    if changes.get("trainable_models") and not changes.get("lora_base_model"):
        del given["lora_rank"]
    if not changes.get("toy"):
        given["model_paths"] = json.dumps(list(weights_of(folder / "model").values()))
    return TrainConfig(**{**given, **changes})


def flags_of(folder: Path, **more: Any) -> dict[str, Any]:
    """The flags that a command line for a project needs, and more of them."""
    names = ("model", "dataset_base_path", "model_paths", "lora_rank")
    given = vars(config(folder))
    return {name: given[name] for name in names} | more


def training_run(
    config: TrainConfig, module_class: type[TrainingModule] = TrainingModule
) -> TrainingRun:
    """What a run of this configuration trains, before its first step."""
    setup, processes = resolve(config), ProcessGroup(Accelerator(cpu=True))
    with toy_models(setup) as ready:
        return prepare(ready, processes, open_training_data(ready), module_class)


def files(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Every weights file of an output folder."""
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def same(a: Any, b: Any) -> bool:
    """Whether two values made of tensors, lists and dictionaries are equal bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(a) == list(b)
            and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def log(folder: Path) -> list[dict[str, float]]:
    """logs/loss.csv, without what depends on the clock."""
    header, *rows = [
        line.split(",") for line in (folder / "logs/loss.csv").read_text().splitlines()
    ]
    printed = [dict(zip(header, map(float, row), strict=True)) for row in rows]
    return [
        {
            name: row[name]
            for name in ("step", "epoch", "loss", "learning_rate", "grad_norm")
        }
        for row in printed
    ]


def train_both_ways(place: Path, **changes: Any) -> None:
    """Train in one run, in two stages, and from their cache without the first dataset; the
    three are equal.
    """
    cache = {"feature_cache": place / "cache"}
    run(config(place, output_path=place / "unsplit", **changes))
    for stage in ("data_process", "train"):
        task = {"task": f"sft:{stage}", "output_path": place / "split"}
        run(config(place, **task, **cache, **changes))
    assert same(files(place / "unsplit"), files(place / "split"))
    assert log(place / "unsplit") == log(place / "split")
    changes |= {"dataset_base_path": None, "output_path": place / "alone"}
    run(config(place, task="sft:train", **cache, **changes))
    assert log(place / "alone") == log(place / "split")


def outcome(folder: Path) -> dict[str, Any]:
    """Everything a run leaves that does not depend on the clock; what a state says of
    the dataset differs by stage.
    """
    state = replace(load_state(states(folder)[0]), content={})
    left = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name
        not in ("config.json", "dstrain.log", ".dstrain.lock", ".dstrain.lock.pid")
    )
    return {
        "files": files(folder),
        "log": log(folder),
        "state": vars(state),
        "names": left,
    }


def plan_digests(folder: Path) -> dict[str, str]:
    """Name of each plan -> a digest of its record, which has those of its columns.

    Without what tells a later run that there is nothing to do: it depends on the clock and
    on the cache's own folder.
    """
    digests = {}
    for path, record in stored_plans(folder):
        del record["about"]["repeatable"]
        digests[path.name] = hash_json("record", record)
    return digests


class PowerCut(Exception):
    """Ends a run where nothing can be saved."""


def stop_at(call: int) -> type[TrainingModule]:
    """A module whose forward pass number `call` (from 0) ends the run."""

    class Stopping(TrainingModule):
        calls = 0

        def forward(self, batch: Batch) -> Tensor:
            if self.calls == call:
                raise PowerCut
            self.calls += 1
            return super().forward(batch)

    return Stopping


def changed(change: Callable[[Any], None]) -> type[TrainingModule]:
    """A module that is changed before each forward pass."""

    class Changed(TrainingModule):
        def forward(self, batch: Batch) -> Tensor:
            change(self)
            return super().forward(batch)

    return Changed


def train(
    folder: Path, module_class: type[TrainingModule] = TrainingModule, **changes: Any
) -> Path:
    """Run, and return the output folder."""
    given = config(folder, **changes)
    run(given, module_class)
    assert given.output_path is not None
    return given.output_path


def configs(folder: Path) -> tuple[ModelConfig, ...]:
    """The files of a model folder, one entry per component with weights."""
    return tuple(ModelConfig(path=paths) for paths in weights_of(folder).values())


def opened(folder: Path, *more: ModelConfig) -> Pipeline:
    """Every component of a model folder, loaded."""
    found = find(
        MODEL, (*configs(folder), *more), [component.name for component in COMPONENTS]
    )
    return Pipeline.from_found(
        MODEL, build("base"), found, torch.device("cpu"), torch.float32
    )


def train_in_two_stages(folder: Path, place: Path, **changes: Any) -> Path:
    """Fill the feature cache `cache` in a place, train from it, and return the output
    folder `out` there.
    """
    given = {"feature_cache": place / "cache", "output_path": place / "out", **changes}
    train(folder, task="sft:data_process", **given)
    return train(folder, task="sft:train", **given)


def validation(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "logs/validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, but locks and what has no final name yet."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.name.startswith(".dstrain.lock")
        and ".tmp-" not in str(path)
    }
