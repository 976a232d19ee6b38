"""The resolved run: a configuration with its family, variant, task and trainables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from dstrain.config import datasets_of, split_commas
from dstrain.config.datasets import DatasetOptions
from dstrain.config.lora_file import parse_preset
from dstrain.config.options import TrainConfig
from dstrain.data import DataConfig, Dataset
from dstrain.data.decoding import skip_undecodable
from dstrain.data.row_checks import absent_masks, open_dataset
from dstrain.data.tables import find_source, installed_forms, join_datasets
from dstrain.distributed import Sharding
from dstrain.errors import MissingFiles, UsageError, about_dataset
from dstrain.graph import PipelineSpec, Plan, Task, make_plan
from dstrain.graph.keepers import AS_LOADED, Keepers
from dstrain.graph.timestep_sampler import TimestepSampler
from dstrain.lora import Trainables, format_named, formats_where
from dstrain.models import DTYPES, Found, ModelConfig, find, precision
from dstrain.pipeline import MASK, find_preset, with_masks_of_dataset, with_presets
from dstrain.pipeline.masked_spec import refuse_no_masks
from dstrain.pipeline.preset_choice import Preset
from dstrain.pipeline.variant_choice import check_denoiser
from dstrain.registry import Extensions, ModelFamily, Option, PromptRow
from dstrain.runs.datasets.flags import data_config, masks_of
from dstrain.runs.datasets.sources import is_published
from dstrain.runs.recorded_versions import versions_of
from dstrain.training.ema import has_modes
from dstrain.training.losses import LossOptions
from dstrain.training.optimizers import OptimizerChoice, check_names, choose_optimizer


@dataclass(frozen=True)
class Setup:
    """A run as the library sees it: its flags resolved, nothing loaded."""

    config: TrainConfig
    family: ModelFamily
    spec: PipelineSpec
    task: Task
    stage: str
    trainables: Trainables
    device: torch.device
    models: tuple[ModelConfig, ...]
    extensions: Extensions
    keepers: Keepers = AS_LOADED
    """How weights are kept."""
    modifiers: Mapping[str, str] = field(default_factory=dict)
    """What changes training after each step: the plugin -> the digest of its code."""
    prompt_rows: Sequence[PromptRow] = ()
    """Rows without latents that plugins add, of which images are made in training."""
    sharding: Sharding | None = None
    """How trained networks are sharded among processes, if they are."""
    is_validation: bool = False
    """Whether the dataset is the second one, whose rows are not trained on."""
    may_lack_masks: bool = False
    """Whether the dataset, one of several, may lack the column of masks that the run
    names for all.
    """
    is_one_of_both: bool = False
    """Whether the command runs both stages, of which this is one."""

    @cached_property
    def validation(self) -> "Setup | None":
        """Return the run with the second dataset in place of its own; None without one.

        So all that is done with the rows of a dataset is done in the same way with those.
        Raises UsageError if there is no such folder, or no dataset in it; stage 2 reads
        nothing of it.
        """
        config = self.config
        base = config.validation_dataset_base_path
        if base is None:
            return None
        metadata = config.validation_dataset_metadata_path
        is_absent = config.dry_run and is_published(base)
        is_read = self.stage != "train" and not is_absent
        if is_read and (metadata is None or not base.is_dir()):
            # Refused here, by the names of the second dataset's own options.
            forms, chosen = installed_forms(config), config.dataset_form
            find_source(base, None, "--validation_dataset", forms=forms, chosen=chosen)
        # Where the cache is named as the dataset, as in DiffSynth-Studio's commands.
        cache_path = self.cache_path if self.stage == "train" else config.feature_cache
        second = replace(
            config,
            dataset_base_path=base,
            dataset_metadata_path=metadata,
            validation_dataset_base_path=None,
            validation_dataset_metadata_path=None,
            dataset=(),
            feature_cache=cache_path,
        )
        spec = with_masks_of_dataset(self.spec, masks_of(second))
        return replace(
            self, config=second, spec=spec, prompt_rows=(), is_validation=True
        )

    @property
    def datasets(self) -> "tuple[Setup, ...]":
        """Return the run, and the run with its second dataset if there is one."""
        return (self,) if self.validation is None else (self, self.validation)

    @cached_property
    def dataset(self) -> Dataset:
        """Return the dataset's rows, checked.

        Raises UsageError for blank cells that the run needs, and for masks, of the run or
        of one dataset, that no row has. With --on_bad_sample skip, every file that the run
        reads was decoded, and bad rows are skipped.
        """
        found = self.checked_dataset
        if not self.is_validation:
            for part in self.parts:
                if part.options.has_own_masks:
                    with about_dataset(part.options.name):
                        refuse_no_masks(part.dataset)
            refuse_no_masks(found)
        if self.config.on_bad_sample == "error":
            return found
        return skip_undecodable(
            found, lambda inputs: self.plan(inputs).used_inputs, self.list_folder
        )

    @cached_property
    def checked_dataset(self) -> Dataset:
        """Return the dataset with its rows checked, but no file decoded."""
        if not self.config.dataset:
            with about_dataset(self.dataset_name):
                return open_dataset(
                    self.data_config, self.spec.inputs, self.check_inputs
                )
        found = [part.dataset for part in self.parts]
        self._refuse_absent_masks()
        return join_datasets(found, [part.setup.dataset_digest for part in self.parts])

    @property
    def dataset_name(self) -> str:
        """Return 'validation' for the second dataset, else ''."""
        return "validation" if self.is_validation else ""

    def _refuse_absent_masks(self) -> None:
        """Refuse the run's column of masks if none of the datasets that it is for has it."""
        column = self.config.mask_column
        found = [
            part.dataset
            for part in self.parts
            if part.setup.config.mask_column == column
        ]
        if column is None or not found or any(MASK in one.columns for one in found):
            return
        names = dict.fromkeys(name for one in found for name in one.table.columns)
        raise absent_masks(column, "no dataset has a", list(names))

    @cached_property
    def parts(self) -> "tuple[DatasetPart, ...]":
        """Return the datasets that are trained on, one or several, in the order of their
        rows.
        """
        if not self.config.dataset:
            return (DatasetPart(self, DatasetOptions(self.config)),)
        parts = []
        for one in datasets_of(self.config):
            own = replace(
                self,
                config=one.config,
                spec=with_masks_of_dataset(self.spec, masks_of(one.config)),
                may_lack_masks=not one.has_own_masks,
            )
            parts.append(DatasetPart(own, one))
        return tuple(parts)

    @property
    def dataset_digest(self) -> str:
        """Return the digest of the rows, but for the files that they name."""
        return self.checked_dataset.table.digest or self.data_config.source.digest()

    def row_of_part(self, row: int) -> "tuple[Setup, int]":
        """Return the dataset that a row is of, and the number of the row there."""
        for part in self.parts:
            count = len(part.setup.checked_dataset.table.rows)
            if row < count:
                return part.setup, row
            row -= count
        raise IndexError(row)

    def name_row(self, row: int) -> str:
        """Name a row of the dataset in messages; rows beyond the last are those of prompts."""
        table = self.dataset.table
        if row >= len(table.rows):
            return self.prompt_rows[row - len(table.rows)].option
        return self.in_words(table.where(row))

    def in_words(self, place: str) -> str:
        """Say of rows that they are of the second dataset, if they are."""
        return f"validation {place}" if self.is_validation else place

    def check_inputs(self, inputs: frozenset[str], columns: tuple[str, ...]) -> Plan:
        """Plan a row with these inputs; raises UsageError for one that the run cannot do
        with.
        """
        components = self.trainables.components
        return make_plan(self.spec, inputs, self.task, components, columns)

    @cached_property
    def plan(self) -> Callable[[frozenset[str]], Plan]:
        """Return a function: the inputs of a row -> its plan."""
        # Cached, since it is called for every row, and most rows have the same inputs.
        components = self.trainables.components
        return cache(lambda inputs: make_plan(self.spec, inputs, self.task, components))

    @cached_property
    def preset(self) -> Preset | None:
        """Return the LoRA of --preset_lora_path with the components it is merged into.

        Raises UsageError if that cannot be told, StateError for a file that cannot be
        read.
        """
        config = self.config
        if config.preset_lora_path is None:
            return None
        file = parse_preset(str(config.preset_lora_path))
        return find_preset(file, config.preset_lora_model, self.family, self.spec)

    @cached_property
    def optimizer(self) -> OptimizerChoice:
        """Return the optimizer, tried, with learning rates of what is trained."""
        choice = choose_optimizer(self.config)
        if self.config.ema_decay is not None and has_modes(choice.kind):
            what = f"would average twice: {choice.name} averages the weights itself"
            raise UsageError("--ema_decay", what, "leave it out")
        aliases = self.spec.experts.roles if self.spec.experts else {}
        rates = check_names(choice.rates, self.trainables.components, aliases)
        return replace(choice, rates=rates)

    def find(
        self, plans: Iterable[Plan], absent: list[MissingFiles] | None = None
    ) -> Found:
        """Find the files and configurations that the run's stage loads for these plans,
        a preset LoRA beside those of its component.

        Missing files are added to `absent`; they are an error where that is None.
        """
        components: dict[str, None] = {}
        configs: dict[str, None] = {}
        for plan in plans:
            components |= dict.fromkeys(plan.components[self.stage])
            configs |= dict.fromkeys(plan.configs[self.stage])
        among = self.spec.components
        found = find(self.family, self.models, components, configs, among, absent)
        check_denoiser(self.family, self.spec, found)
        preset = self.preset
        presets = {}
        if preset is not None:
            presets = dict.fromkeys(preset.components, preset.file)
        files = with_presets(found.files, presets)
        return replace(found, files=files).kept(self.keepers)

    @property
    def typed(self) -> TrainConfig:
        """Return the configuration as it was typed: the same command again."""
        if not self.is_one_of_both:
            return self.config
        return replace(self.config, task=self.config.task_name)

    @property
    def recorded(self) -> TrainConfig:
        """Return the configuration as it is written for other commands to read: it means
        the same there with other model files.
        """
        changes: dict[str, Any] = {**self.keepers.recorded, **self.objective}
        if self.preset is not None:
            # Found by its header, its keys or its path, where no flag names it.
            changes["preset_lora_model"] = ",".join(self.preset.components)
            file = replace(self.preset.file, component="")
            changes["preset_lora_path"] = Path(file.typed)
        return replace(self.typed, **changes)

    @property
    def objective(self) -> dict[str, str]:
        """Return the options that the variant decides where they are left out."""
        defaults = self.spec.defaults_of_training
        return {
            name: getattr(self.config, name) or one for name, one in defaults.items()
        }

    @property
    def checkpoints(self) -> bool:
        """Return whether blocks are recomputed in the backward pass."""
        return self.config.checkpoints or self.keepers.recompute

    @property
    def data_config(self) -> DataConfig:
        """Return where the dataset is and how it is read, as the flags say."""
        found = data_config(self.config, self.spec, self.is_validation)
        return replace(found, may_lack_masks=self.may_lack_masks)

    @property
    def mixed_precision(self) -> str:
        """Return 'bf16' or 'no': the flag, else the launcher's configuration, else bf16 on a
        GPU and none on a CPU.
        """
        return precision(self.config.mixed_precision, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of components that are not trained."""
        return DTYPES[self.mixed_precision]

    @property
    def trained_experts(self) -> list[str]:
        """Return the experts of the denoiser that are trained, or beside which something
        is.
        """
        experts = self.spec.experts
        if experts is None:
            return []
        trained = {experts.expert_of(name) for name in self.trainables.components}
        return [name for name in experts.components if name in trained]

    def build_timestep_sampler(self) -> TimestepSampler:
        """Return the distribution of training timesteps.

        It lies between the boundaries given, else those of the only expert trained.
        """
        config = self.config
        schedule = self.spec.schedule
        if config.timestep_shift is not None:
            schedule = schedule.shifted(config.timestep_shift)
        low, high = 0.0, 1.0
        experts = self.spec.experts
        if experts is not None and len(self.trained_experts) == 1:
            (expert,) = self.trained_experts
            least, greatest = experts.ranges[expert]
            high = schedule.boundary_fraction(least)
            if expert != experts.components[0]:  # the noisiest, which begins at 0
                low = schedule.boundary_fraction(greatest)
        if config.min_timestep_boundary is not None:
            low = config.min_timestep_boundary
        if config.max_timestep_boundary is not None:
            high = config.max_timestep_boundary
        return TimestepSampler(
            schedule,
            self.objective["timestep_sampling"],
            self.objective["loss_weighting"],
            low,
            high,
            config.timestep_mean,
            config.timestep_std,
            config.min_snr_gamma,
        )

    def build_loss_options(self) -> LossOptions:
        """Return how the loss measures errors, and what it adds to noise."""
        config = self.config
        return LossOptions(
            config.loss,
            config.huber_delta,
            config.huber_schedule,
            config.noise_offset,
            config.input_perturbation,
        )

    @property
    def cache_path(self) -> Path:
        """Return the folder of the feature cache: --feature_cache, else where
        DiffSynth-Studio's commands have it in this stage.
        """
        config = self.config
        folder = config.feature_cache or config.dataset_base_path
        if self.stage == "data_process":
            folder = config.feature_cache or config.output_path
        if not folder:
            what = "is required: the folder of the feature cache"
            raise UsageError("--feature_cache", what)
        return folder

    @property
    def saving(self) -> Option | None:
        """Return the family's flag that names another program's LoRA keys, if it is given."""
        for option in self.family.options:
            if option.saves and option.name in self.config.family_options:
                return option
        return None

    def saved_names(self, component: str) -> str:
        """Return the program in whose key names a trained component is saved."""
        config = self.config
        if config.lora_format is not None:
            return format_named(config.lora_format).name
        has_lora = any(one.component == component for one in self.trainables.lora)
        is_default = component == self.family.default_trainable
        if self.saving is not None and has_lora and is_default:
            return self.saving.saves
        asked = formats_where("asked_by", config)
        return asked[0].name if asked else "diffusers"

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Return the versions of what computes, which are recorded, and part of no key."""
        return versions_of(self.family, self.device)

    @property
    def output(self) -> Path:
        """Return the folder that the run writes: in stage 1 that of the feature cache."""
        folder = self.config.output_path
        if folder is None or self.stage == "data_process":
            return self.cache_path
        return folder

    @property
    def list_folder(self) -> Path:
        """Return the folder of bad_samples.jsonl: the run's logs; in stage 1 the cache."""
        return self.output if self.stage == "data_process" else self.output / "logs"

    def all_inputs(self) -> frozenset[str]:
        """Return every input that a dataset of this variant can have, optional ones if
        asked for.
        """
        return self.spec.inputs_of_rows(split_commas(self.config.extra_inputs))


@dataclass(frozen=True)
class DatasetPart:
    """One of the datasets that a run trains on."""

    setup: Setup
    """The run with this dataset alone."""
    options: DatasetOptions
    """The options of the dataset."""

    @property
    def dataset(self) -> Dataset:
        """Return its rows, checked; a UsageError of an option names the dataset."""
        with about_dataset(self.options.name):
            return self.setup.checked_dataset
