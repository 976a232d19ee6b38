"""A command line resolved: family, variant, task, trainables and data settings, before anything is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

import torch

from dstrain.bad_samples import decodable, list_folder
from dstrain.clips import FrameSampling
from dstrain.config import TrainConfig
from dstrain.dataset import DataConfig, Dataset, find_metadata, open_dataset
from dstrain.distill import OWN_TASKS
from dstrain.errors import UsageError, nearest
from dstrain.flags import flags, split_commas
from dstrain.hooks import Extensions, load_extensions
from dstrain.lora import LoraSpec
from dstrain.model_files import Found, ModelConfig, find, model_configs
from dstrain.pictures import Resolution
from dstrain.plan import Plan
from dstrain.plugins import load_record
from dstrain.preset import Preset, check_preset, preset_of
from dstrain.record import ModelRecord, Option
from dstrain.schedule import TRAIN_TIMESTEPS, NoiseLevels
from dstrain.sources import Column, Given
from dstrain.tasks import Task
from dstrain.trainables import Trainables
from dstrain.unfit import check_components, check_frames, check_saved_names
from dstrain.variants import advice_on_lists, check_extra_inputs, choose_variant, hints_of, role_played, settled
from dstrain.wiring import Wiring
from dstrain.world import DTYPES, World, default_device, precision


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
        """The data set's rows, checked; raises UsageError for blank cells that the run needs.

        With --on_bad_sample skip, every file that the run reads was decoded, and bad rows are left out.
        """
        skips = self.config.on_bad_sample == "skip"
        planned = partial(self.wiring.plan, task=self.task, trainables=self.trainables.components)
        data = self.data_config
        try:
            found = open_dataset(data, self.wiring.inputs, lambda names, there: planned(names, columns=there))
        except UsageError as error:
            path = data.metadata_path or find_metadata(data.base_path)
            advice = advice_on_lists(path, self.record, self.wiring)
            raise UsageError(error.where, error.what, *error.help_lines, *advice) from error
        for inputs in dict.fromkeys(frozenset(cells) for cells in found.rows):
            planned(inputs, columns=found.table.columns)
        return decodable(found, lambda inputs: self.plan(inputs).used_inputs, list_folder(self)) if skips else found

    @cached_property
    def preset(self) -> Preset | None:
        """The LoRA of --preset_lora_path, and the component it is merged into."""
        return preset_of(self.config, self.record, self.wiring)

    def find(self, components: Iterable[str], bare: Iterable[str]) -> Found:
        """Find the files of components, a preset LoRA beside its own, and configurations of these and `bare`."""
        found = find(self.record, self.models, components, bare, self.wiring.components)
        return self.preset.into(found) if self.preset is not None else found

    @property
    def data_config(self) -> DataConfig:
        """The data set's flags."""
        c = self.config
        if not c.dataset_base_path:
            raise UsageError("--dataset_base_path", "is required: the folder that holds the data set")
        keys = split_commas(c.data_file_keys) if c.data_file_keys else None
        extra = split_commas(c.extra_inputs)
        return DataConfig(
            c.dataset_base_path,
            c.dataset_metadata_path,
            keys,
            self.resolution,
            extra,
            self.frame_sampling,
            c.dataset_root,
            c.url_cache,
            c.on_bad_sample,
        )

    @property
    def resolution(self) -> Resolution:
        """--height, --width and --max_pixels."""
        return Resolution(self.config.height, self.config.width, self.config.max_pixels)

    @property
    def frame_sampling(self) -> FrameSampling:
        """--num_frames, --frame_sampling and --frame_samples."""
        return FrameSampling(self.config.num_frames, self.config.frame_sampling, self.config.frame_samples or 1)

    @property
    def mixed_precision(self) -> str:
        """'bf16' or 'no': the flag, else the launcher's configuration, else bf16 on a GPU and none on a CPU."""
        return precision(self.config.mixed_precision, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of components that are not trained."""
        return DTYPES[self.mixed_precision]

    @property
    def levels(self) -> NoiseLevels:
        """The noise levels this run draws: between its boundaries, else those of the one expert trained."""
        c, schedule, expert = self.config, self.wiring.schedule, self.wiring.expert
        low, high = 0.0, 1.0
        trained = [part for part in expert.components if part in self.trainables.components] if expert else []
        if expert is not None and len(trained) == 1:
            least, greatest = expert.ranges[trained[0]]
            high = schedule.fraction(least)
            low = schedule.fraction(greatest) if greatest < TRAIN_TIMESTEPS else 0.0
        low = low if c.min_timestep_boundary is None else c.min_timestep_boundary
        high = high if c.max_timestep_boundary is None else c.max_timestep_boundary
        return NoiseLevels(schedule, c.timestep_sampling, c.loss_weighting, low, high)

    @property
    def trains_experts(self) -> bool:
        """Whether several parts of a denoiser are trained at once."""
        parts = self.wiring.expert.components if self.wiring.expert else ()
        return len(set(parts) & set(self.trainables.components)) > 1

    @property
    def store_path(self) -> Path:
        """The feature store's folder: --feature_cache, else where the reference documents put it for this stage."""
        c = self.config
        place = c.feature_cache or (c.output_path if self.stage == "data_process" else c.dataset_base_path)
        if not place:
            raise UsageError("--feature_cache", "is required: the folder of the feature store")
        return place

    @property
    def saving(self) -> Option | None:
        """The family's flag, if given, that says in which program's names LoRA is saved."""
        given = self.config.family_options
        return next((one for one in self.record.options if one.saves and one.name in given), None)

    def plan(self, inputs: frozenset[str]) -> Plan:
        """The plan for rows with these inputs."""
        return self.wiring.plan(inputs, self.task, self.trainables.components)

    @property
    def used_inputs(self) -> frozenset[str]:
        """Inputs that the data set's rows give and the run reads."""
        return frozenset().union(*(self.plan(frozenset(cells)).used_inputs for cells in self.dataset.rows))

    def all_inputs(self) -> frozenset[str]:
        """Every input a data set of this variant can give, of the extra ones those that were asked for."""
        asked = split_commas(self.config.extra_inputs)
        sources = self.wiring.inputs.items()
        left_out = {name for name, s in sources if isinstance(s, Column) and s.extra and name not in asked}
        return frozenset(name for name, s in sources if not isinstance(s, Given)) - left_out


def resolve(config: TrainConfig) -> Setup:
    """Find the family, variant and task of a configuration; raises UsageError naming what is unknown."""
    record = load_record(config.model, config.left_out)
    models = model_configs(config, record)
    extensions = load_extensions(config.left_out)
    tasks, unusable = known_tasks(extensions)
    extensions = replace(extensions, broken=(*extensions.broken, *unusable))
    task = _task(config, tasks, extensions.broken)
    if config.variant is None:
        check_extra_inputs(config, record, task)
    variant = choose_variant(record, config.variant, hints_of(config, models, task))
    wiring = settled(record.load("wiring")(variant), record, config)
    check_frames(config, wiring)
    check_components(config, wiring)
    setup = Setup(
        config,
        record,
        wiring.joined(task),
        task,
        config.stage,
        role_played(trainables_of(config, record), wiring, record, models),
        default_device(),
        models,
        extensions,
    )
    check_saved_names(setup)
    if not config.dry_run:
        check_preset(setup)
    _ = setup.levels  # made once, so that boundaries which leave nothing are refused before anything is loaded
    return setup


def _task(config: TrainConfig, tasks: Mapping[str, Task], broken: Sequence[str]) -> Task:
    """The task named; raises UsageError if there is none, or for an option that its loss does not use."""
    if config.task_name not in tasks:
        known = ", ".join(tasks)
        what = f"no task named {config.task_name!r}; tasks: {known}{nearest(config.task_name, tasks)}"
        raise UsageError("--task", what, *broken[:3])
    task = tasks[config.task_name]
    for flag in flags(TrainConfig):
        if flag.name in task.idle_options and getattr(config, flag.name) != flag.default:
            raise UsageError(flag.spelled, f"would do nothing: the loss of task {task.name} draws no timesteps")
    return task


def known_tasks(extensions: Extensions) -> tuple[Mapping[str, Task], tuple[str, ...]]:
    """Tasks by name, core's own and those of plugins; and which of plugins cannot be used, and why."""
    offers = extensions.offered("dstrain_tasks", Task, OWN_TASKS)
    return {**OWN_TASKS, **offers.items}, offers.broken


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
        world.warn(f"{reason}")
    if setup.stage == "train":
        return
    if not setup.stage and setup.config.feature_cache is not None:
        world.warn(f"--feature_cache is not used in one piece; it is by --task {setup.task.name}:train")
    shown = [cell.frames for cells in setup.dataset.rows for cell in cells.values() if cell.kind == "frames"]
    short = [frames for frames in shown if frames < setup.config.num_frames]
    if short:
        world.warn(f"{len(short)} of {len(shown)} clips have fewer than --num_frames "
                  f"{setup.config.num_frames} frames; the shortest has {min(short)}")  # fmt: skip
    for name in setup.dataset.unread_columns:
        world.warn(f"{setup.dataset.table.path}: column {name!r} is read by no input of this variant")
