"""Runs of programs: their files are written, and the first batches are trained on."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from dstrain import Batch, Frames, ModelConfig, TrainConfig, TrainingModule
from dstrain.distributed import ProcessGroup
from dstrain.plugin import Component, Files, ModelFamily
from dstrain.registry import load_extensions
from dstrain.runs import Setup, open_training_data, prepare
from dstrain.training import split_across_ranks
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.programs import NETS, Net, Program


@dataclass(frozen=True)
class Record(ModelFamily):
    """A family that is not installed anywhere: its components are at hand."""

    parts: tuple[Component, ...] = ()

    def load(self, part: str) -> Any:
        assert part == "components"
        return self.parts


def load_net(files: Files, configuration: Mapping[str, Any], dtype: torch.dtype) -> Net:
    net = Net(configuration["dropout"])
    net.load_state_dict(
        {
            name.partition(".")[2]: weight
            for name, weight in load_file(files.paths[0]).items()
        }
    )
    return net.to(dtype)


RECORD = Record(
    "random", "", "", "", ("base",), "dit", MappingProxyType({}), MappingProxyType({}),
    parts=tuple(Component(net, SimpleNamespace(load=load_net), net, (f"{net}.*",)) for net in NETS),
)  # fmt: skip


def write_program(made: Program, folder: Path) -> Setup:
    """Write the program's networks and dataset; returns a run of it in a single run."""
    torch.manual_seed(0)
    for i, net in enumerate(NETS):
        weights = {
            f"{net}.{name}": weight for name, weight in Net(0).state_dict().items()
        }
        config = json.dumps({"dropout": made.dropouts[net], "shift": 0.1 * i})
        save_file(weights, folder / f"{net}.safetensors", {"config": config})
    for name, size in (("small", (3, 4)), ("wide", (5, 4))):
        # Pillow's own noise depends on how much of it was made before.
        pixels = np.random.default_rng(size).integers(
            0, 256, (size[1], size[0], 3), np.uint8
        )
        Image.fromarray(pixels).save(folder / f"{name}.png")
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(made.rows[0]))
        writer.writeheader()
        writer.writerows(made.rows)
    config = TrainConfig(
        model="random", dataset_base_path=folder, dataset_repeat=3, batch_size=made.batch_size,
        feature_cache=folder / "cache", output_path=folder / "out",
    )  # fmt: skip
    models = tuple(ModelConfig(path=str(folder / f"{net}.safetensors")) for net in NETS)
    return Setup(
        config,
        RECORD,
        made.spec,
        made.task,
        "",
        made.trainables,
        torch.device("cpu"),
        models,
        load_extensions(),
    )


def run(
    setup: Setup, module_class: type[TrainingModule] = TrainingModule
) -> tuple[TrainingModule, Any, list[Any]]:
    """The module, its samples, and the loss and gradients of the first batches, without
    an update between them.
    """
    processes = ProcessGroup(Accelerator(cpu=True))
    samples = open_training_data(setup)
    training_run = prepare(setup, processes, samples, module_class)
    for name, parameter in training_run.module.trained.parameters.items():
        if (
            "lora_B" in name
        ):  # zero at first, and then the gradients of lora_A are zero too
            nn.init.constant_(parameter, 0.3)
    seen = []
    for keys in islice(training_run.order.global_batches(0), 2):
        (micro,) = split_across_ranks(keys, setup.config.batch_size, 0, 1)
        training_run.module.zero_grad(set_to_none=True)
        loss = training_run.module(
            Batch(micro, [samples.source.sample(key.row) for key in keys])
        )
        if loss.requires_grad:
            loss.backward()
        seen.append(
            (
                loss.detach(),
                {
                    name: p.grad
                    for name, p in training_run.module.trained.parameters.items()
                },
            )
        )
    return training_run.module, samples.source, seen


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same bit for bit; None equals None alone."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, Frames) and isinstance(b, Frames):
        return equal(a.pixels, b.pixels) and a.fps == b.fps
    return type(a) is type(b) and bool(a == b)
