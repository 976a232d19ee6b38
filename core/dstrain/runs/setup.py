"""The resolved run: a configuration with its family, variant, task and trainables."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

import torch

from dstrain.config.fields import split_commas
from dstrain.config.schema import TrainConfig
from dstrain.data.clips import FrameSampling
from dstrain.data.dataset import DataConfig, Dataset, find_metadata, open_dataset
from dstrain.data.decoding import skip_undecodable
from dstrain.data.images import Resolution
from dstrain.data.metadata import read_metadata
from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, InferenceOnly
from dstrain.graph.plan import Plan, make_plan
from dstrain.graph.schedule import TRAIN_TIMESTEPS, TimestepSampler
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.task import Task
from dstrain.lora.layers import Trainables
from dstrain.lora.preset import Preset
from dstrain.lora.reader import check_lora_file, groups_in
from dstrain.models.device import DTYPES, precision
from dstrain.models.locate import Found, ModelConfig, find
from dstrain.registry.family import ModelFamily, Option
from dstrain.registry.hooks import Extensions
from dstrain.storage.safetensors import read_tensors


def preset_of(
    config: TrainConfig, family: ModelFamily, spec: PipelineSpec
) -> Preset | None:
    """Return the preset that the flags name: for --preset_lora_model, else the
    component its header or its keys name.

    Raises UsageError if neither says one that the variant has, StateError for a file
    that cannot be read.
    """
    path, named = config.preset_lora_path, config.preset_lora_model
    if path is None:
        return None
    if named is not None and named not in spec.components:
        known = f"{', '.join(spec.components)}{nearest(named, spec.components)}"
        what = f"variant {spec.variant} has no component {named!r}; components: {known}"
        raise UsageError("--preset_lora_model", what)
    check_lora_file(path)
    tensors, header = read_tensors(path)
    groups = groups_in(path, tensors, family)
    told = [
        name
        for name in spec.components
        if all(name in group.prefix.components for group in groups)
    ]
    by_header = [name for name in told if name == header.get("component")]
    component = named or (
        by_header[0] if by_header else told[0] if len(told) == 1 else ""
    )
    if not component:
        what = (
            f"is required: {path} may be of {' or '.join(told)}"
            if told
            else f"{path} is of several components"
        )
        raise UsageError("--preset_lora_model", what)
    return Preset(path, component)


def advice_on_lists(path: Path, family: ModelFamily, spec: PipelineSpec) -> list[str]:
    """Name the variants that read several files, for each column of lists that this one
    reads a single file from.
    """
    table, advice = read_metadata(path), []
    for column in spec.inputs.values():
        if (
            isinstance(column, Column)
            and column.kind == "image"
            and column.name in table.columns
        ):
            cells = (row[column.name] for row in table.rows)
            if any(
                isinstance(cell, list) or cell.lstrip().startswith('["')
                for cell in cells
            ):
                several = [
                    name
                    for name in family.variants
                    if any(
                        isinstance(one, Column)
                        and (one.name, one.kind) == (column.name, "images")
                        for one in family.spec(name).inputs.values()
                    )
                ]
                other = (
                    f"; several are read by --variant {' or '.join(several)}"
                    if several
                    else ""
                )
                advice.append(
                    f"variant {spec.variant} reads one file from column {column.name!r}{other}"
                )
    return advice


@dataclass(frozen=True)
class Setup:
    """What a run is, in the library's own terms."""

    config: TrainConfig
    family: ModelFamily
    spec: PipelineSpec
    task: Task
    stage: str
    trainables: Trainables
    device: torch.device
    models: tuple[ModelConfig, ...]
    extensions: Extensions
    _plans: dict[frozenset[str], Plan] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def dataset(self) -> Dataset:
        """The data set's rows, checked; raises UsageError for blank cells that the run
        needs.

        With --on_bad_sample skip, every file that the run reads was decoded, and bad
        rows are left out.
        """
        skips = self.config.on_bad_sample == "skip"
        planned = partial(
            make_plan,
            self.spec,
            task=self.task,
            trainables=self.trainables.components,
        )
        data = self.data_config
        try:
            found = open_dataset(
                data,
                self.spec.inputs,
                lambda names, there: planned(names, columns=there),
            )
        except UsageError as error:
            path = data.metadata_path or find_metadata(data.base_path)
            advice = advice_on_lists(path, self.family, self.spec)
            raise UsageError(
                error.where, error.what, *error.help_lines, *advice
            ) from error
        for inputs in dict.fromkeys(frozenset(cells) for cells in found.rows):
            planned(inputs, columns=found.table.columns)
        return (
            skip_undecodable(
                found, lambda inputs: self.plan(inputs).used_inputs, self.list_folder
            )
            if skips
            else found
        )

    @cached_property
    def preset(self) -> Preset | None:
        """The LoRA of --preset_lora_path, and the component it is merged into."""
        return preset_of(self.config, self.family, self.spec)

    def find(self, components: Iterable[str], config_only: Iterable[str]) -> Found:
        """Find the files of components, a preset LoRA beside its own, and
        configurations of these and `bare`.
        """
        found = find(
            self.family, self.models, components, config_only, self.spec.components
        )
        return self.preset.add_to(found) if self.preset is not None else found

    @property
    def data_config(self) -> DataConfig:
        """The data set's flags."""
        c = self.config
        if not c.dataset_base_path:
            raise UsageError(
                "--dataset_base_path", "is required: the dataset directory"
            )
        keys = split_commas(c.data_file_keys) if c.data_file_keys else None
        optional = split_commas(c.extra_inputs)
        return DataConfig(
            c.dataset_base_path,
            c.dataset_metadata_path,
            keys,
            self.resolution,
            optional,
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
        return FrameSampling(
            self.config.num_frames,
            self.config.frame_sampling,
            self.config.frame_samples or 1,
        )

    @property
    def mixed_precision(self) -> str:
        """'bf16' or 'no': the flag, else the launcher's configuration, else bf16 on a
        GPU and none on a CPU.
        """
        return precision(self.config.mixed_precision, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of components that are not trained."""
        return DTYPES[self.mixed_precision]

    @property
    def timestep_sampler(self) -> TimestepSampler:
        """The noise levels this run draws: between its boundaries, else those of the
        one expert trained.
        """
        c, schedule, experts = self.config, self.spec.schedule, self.spec.experts
        low, high = 0.0, 1.0
        trained = (
            [part for part in experts.components if part in self.trainables.components]
            if experts
            else []
        )
        if experts is not None and len(trained) == 1:
            least, greatest = experts.ranges[trained[0]]
            high = schedule.boundary_fraction(least)
            low = (
                schedule.boundary_fraction(greatest)
                if greatest < TRAIN_TIMESTEPS
                else 0.0
            )
        low = low if c.min_timestep_boundary is None else c.min_timestep_boundary
        high = high if c.max_timestep_boundary is None else c.max_timestep_boundary
        return TimestepSampler(
            schedule, c.timestep_sampling, c.loss_weighting, low, high
        )

    @property
    def trains_experts(self) -> bool:
        """Whether several parts of a denoiser are trained at once."""
        parts = self.spec.experts.components if self.spec.experts else ()
        return len(set(parts) & set(self.trainables.components)) > 1

    @property
    def cache_path(self) -> Path:
        """The feature cache's folder: --feature_cache, else where the reference
        documents put it for this stage.
        """
        c = self.config
        place = c.feature_cache or (
            c.output_path if self.stage == "data_process" else c.dataset_base_path
        )
        if not place:
            raise UsageError(
                "--feature_cache", "is required: the directory of the feature cache"
            )
        return place

    @property
    def saving(self) -> Option | None:
        """The family's flag, if given, that says in which program's names LoRA is
        saved.
        """
        given = self.config.family_options
        return next(
            (one for one in self.family.options if one.saves and one.name in given),
            None,
        )

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that compute, and the device: recorded, and part of
        no key.
        """
        names = ("core", "torch", "transformers", "accelerate", "safetensors", "pillow")
        return {name: version(name) for name in names} | {"device": self.device.type}

    @property
    def output(self) -> Path:
        """The folder that the run locks: --output_path, or the feature cache."""
        return self.config.output_path or self.cache_path

    @property
    def list_folder(self) -> Path:
        """The folder of bad_samples.jsonl: the run's logs, or in stage 1 its output."""
        return self.output if self.stage == "data_process" else self.output / "logs"

    def plan(self, inputs: frozenset[str]) -> Plan:
        """Return the plan for rows with these inputs, made once for each set of inputs."""
        # Called for every row of a dataset, of which most have the same inputs.
        if inputs not in self._plans:
            self._plans[inputs] = make_plan(
                self.spec, inputs, self.task, self.trainables.components
            )
        return self._plans[inputs]

    @property
    def used_inputs(self) -> frozenset[str]:
        """Inputs that the data set's rows give and the run reads."""
        return frozenset().union(
            *(self.plan(frozenset(cells)).used_inputs for cells in self.dataset.rows)
        )

    def all_inputs(self) -> frozenset[str]:
        """Return every input that a dataset of this variant can have, optional ones if
        asked for.
        """
        asked = split_commas(self.config.extra_inputs)
        sources = self.spec.inputs.items()
        left_out = {
            name
            for name, s in sources
            if isinstance(s, Column) and s.optional and name not in asked
        }
        return (
            frozenset(name for name, s in sources if not isinstance(s, InferenceOnly))
            - left_out
        )
