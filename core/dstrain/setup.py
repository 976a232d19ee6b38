"""A command line resolved: family, variant, task, trainables and data settings, before anything is loaded."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch

from dstrain.config import TrainConfig
from dstrain.dataset import DataConfig, Dataset, open_dataset
from dstrain.errors import UsageError, nearest
from dstrain.flags import split_commas
from dstrain.hooks import Extensions, load_extensions
from dstrain.loading import ModelConfig, model_configs
from dstrain.lora import LoraSpec
from dstrain.losses import SFT
from dstrain.pictures import Resolution
from dstrain.plan import Plan
from dstrain.plugins import load_record, variant_of
from dstrain.record import ModelRecord
from dstrain.schedule import NoiseLevels
from dstrain.sources import Given
from dstrain.tasks import Task
from dstrain.trainables import Trainables
from dstrain.wiring import Wiring
from dstrain.world import World, default_device


@dataclass(frozen=True)
class Setup:
    """What a run is, in the library's own terms."""

    config: TrainConfig
    record: ModelRecord
    wiring: Wiring
    task: Task
    stage: str
    trainables: Trainables
    device: torch.device
    models: tuple[ModelConfig, ...]
    extensions: Extensions

    @cached_property
    def dataset(self) -> Dataset:
        """The data set's rows, checked but not decoded."""
        return open_dataset(self.data_config, self.wiring.inputs)

    @property
    def data_config(self) -> DataConfig:
        """The data set's flags."""
        c = self.config
        if not c.dataset_base_path:
            raise UsageError("--dataset_base_path", "is required: the folder that holds the data set")
        keys = split_commas(c.data_file_keys) if c.data_file_keys else None
        return DataConfig(
            c.dataset_base_path, c.dataset_metadata_path, keys, self.resolution, split_commas(c.extra_inputs)
        )

    @property
    def resolution(self) -> Resolution:
        """--height, --width and --max_pixels."""
        return Resolution(self.config.height, self.config.width, self.config.max_pixels)

    @property
    def mixed_precision(self) -> str:
        """'bf16' or 'no': the flag, else the launcher's configuration, else bf16 on a GPU and none on a CPU."""
        default = "bf16" if self.device.type == "cuda" else "no"
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        return self.config.mixed_precision or (launcher if launcher != "no" else default)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of components that are not trained."""
        return torch.bfloat16 if self.mixed_precision == "bf16" else torch.float32

    @property
    def levels(self) -> NoiseLevels:
        """The noise levels this run draws."""
        c = self.config
        return NoiseLevels(self.wiring.schedule, c.timestep_sampling, c.loss_weighting,
                           c.min_timestep_boundary, c.max_timestep_boundary)  # fmt: skip

    @property
    def store_path(self) -> Path:
        """The feature store's folder: --feature_cache, else where the reference documents put it for this stage."""
        c = self.config
        place = c.feature_cache or (c.output_path if self.stage == "data_process" else c.dataset_base_path)
        if not place:
            raise UsageError("--feature_cache", "is required: the folder of the feature store")
        return place

    def plan(self, inputs: frozenset[str]) -> Plan:
        """The plan for rows with these inputs."""
        return self.wiring.plan(inputs, self.task, self.trainables.components)

    @property
    def used_inputs(self) -> frozenset[str]:
        """Inputs that the data set's rows give and the run reads."""
        return frozenset().union(*(self.plan(frozenset(cells)).used_inputs for cells in self.dataset.rows))

    def all_inputs(self) -> frozenset[str]:
        """Every input a data set of this variant can give."""
        return frozenset(name for name, source in self.wiring.inputs.items() if not isinstance(source, Given))


def resolve(config: TrainConfig) -> Setup:
    """Find the family, variant and task of a configuration; raises UsageError naming what is unknown."""
    record = load_record(config.model, config.left_out)
    wiring: Wiring = record.load("wiring")(variant_of(record, config.variant))
    extensions = load_extensions(config.left_out)
    tasks = known_tasks(extensions)
    if config.task_name not in tasks:
        known = ", ".join(tasks)
        raise UsageError(
            "--task", f"no task named {config.task_name!r}; tasks: {known}{nearest(config.task_name, tasks)}"
        )
    return Setup(
        config,
        record,
        wiring,
        tasks[config.task_name],
        config.stage,
        trainables_of(config, record),
        default_device(),
        model_configs(config, record),
        extensions,
    )


def known_tasks(extensions: Extensions) -> Mapping[str, Task]:
    """Tasks by name: core's own, and those of plugins."""
    tasks = {SFT.name: SFT}
    for task in (task for answer in extensions.hook.dstrain_tasks() for task in answer):
        if task.name in tasks:
            both = f"{tasks[task.name].loss.name} and {task.loss.name}"
            raise UsageError(
                "plugins", f"two tasks are named {task.name!r}, with losses {both}", "leave one out with -p no:NAME"
            )
        tasks[task.name] = task
    return tasks


def trainables_of(config: TrainConfig, record: ModelRecord) -> Trainables:
    """What the flags ask to train; neither kind asked for: LoRA on the family's default component."""
    full = config.trainables
    base = config.lora_base_model or ("" if full else record.default_trainable)
    if not base:
        return Trainables(full)
    targets = config.lora_targets or record.lora_targets.get(base, ())
    if not targets:
        raise UsageError("--lora_target_modules", f"is required: {record.name} has no default targets for {base!r}",
                         f"it has for {', '.join(record.lora_targets)}")  # fmt: skip
    alpha = float(config.lora_alpha if config.lora_alpha is not None else config.lora_rank)
    return Trainables(full, (LoraSpec(base, tuple(targets), config.lora_rank, alpha),))


def versions(device: torch.device) -> dict[str, str]:
    """What computed: library versions and the device; recorded, and no part of any key."""
    names = ("core", "torch", "transformers", "accelerate", "safetensors", "pillow")
    return {name: version(name) for name in names} | {"device": device.type}


def warn(setup: Setup, world: World) -> None:
    """Name the plugins that were left out because they are broken, and the data set's columns that nobody reads."""
    for reason in setup.extensions.broken:
        world.say(f"dstrain: warning: {reason}")
    if setup.stage == "train":
        return
    for name in setup.dataset.unread_columns:
        world.say(f"dstrain: warning: {setup.dataset.table.path}: column {name!r} is read by no input of this variant")
