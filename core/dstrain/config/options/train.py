"""The configuration of a training run, and the options of its task, validation and files."""

from pathlib import Path
from typing import Any, ClassVar

from dstrain.config.conversion import converted, options
from dstrain.config.converters import as_optional_path
from dstrain.config.fields import Effect, option
from dstrain.config.options.data import DataOptions
from dstrain.config.options.lora import LoraOptions
from dstrain.config.options.model import ModelChoice
from dstrain.config.options.optimizer import OptimizerOptions
from dstrain.config.options.output import OutputOptions
from dstrain.config.options.samples import SampleOptions
from dstrain.config.options.training import MemoryOptions, TrainingOptions
from dstrain.config.plugin_options import flags, plugin_flags


@options
class TaskChoice:
    """What a run does: a task, or one of its two stages alone."""

    task: str = option(
        "training",
        "Training task, with --feature_cache in two stages. TASK:data_process and TASK:train run one of them alone.",
        "sft",
        affects={"recipe"},
    )

    @property
    def task_name(self) -> str:
        """Return the task without its stage."""
        return self.task.partition(":")[0]

    @property
    def stage(self) -> str:
        """Return 'data_process', 'train', or '' for a command that names no stage."""
        return self.task.partition(":")[2]


@options
class ValidationOptions:
    """The rows that are not trained on, and when their loss is computed."""

    validation_split: float | None = option(
        "training: validation",
        "Fraction of the rows that are not trained on; their loss is logged. They are chosen by --seed.",
        affects={"resolved", "timestep_sampler"},
        above=0,
        below=1,
        common=True,
    )
    validation_dataset_base_path: Path | None = converted(
        "training: validation",
        "A second dataset, of any form, which is not trained on; its loss is logged.",
        converter=as_optional_path,
        default=None,
        affects={"timestep_sampler"},
    )
    validation_dataset_metadata_path: Path | None = converted(
        "training: validation",
        "Metadata file of the second dataset. Defaults to what is in --validation_dataset_base_path.",
        converter=as_optional_path,
        default=None,
    )
    validation_steps: int | None = option(
        "training: validation",
        "Compute the validation loss every N steps. Defaults to whenever weights are saved.",
        minimum=1,
    )


@options
class TrainConfig(
    OutputOptions,
    LoraOptions,
    MemoryOptions,
    OptimizerOptions,
    ValidationOptions,
    TrainingOptions,
    SampleOptions,
    DataOptions,
    TaskChoice,
    ModelChoice,
):
    """A training run, or one stage of it, as plain data."""

    command: ClassVar[str] = "train"

    # The last base comes first in the order of the fields, and so in --help.
    json: bool = option(
        "general",
        "With --dry_run, print a JSON object per line: rows, buckets, steps, files, and what plugins say.",
        False,
        affects={"start"},
    )

    @property
    def runs_both_stages(self) -> bool:
        """Return whether the command fills a feature cache, then trains from it."""
        return not self.stage and self.feature_cache is not None


def options_affecting(*effects: Effect) -> tuple[str, ...]:
    """Return the names of a training run's options that have one of these effects."""
    return tuple(
        flag.name for flag in flags(TrainConfig) if flag.affects & set(effects)
    )


def recorded_values(config: TrainConfig, *effects: Effect) -> dict[str, Any]:
    """Return the values of the options that have one of these effects, by name, as runs
    and caches record and compare them: an `if_given` one or a plugin's only where it is
    not at its default, so that older records stay the same.
    """
    values = {}
    of_plugins = plugin_flags(TrainConfig)
    for flag in flags(TrainConfig):
        value = getattr(config, flag.name)
        is_optional = "if_given" in flag.affects or flag.name in of_plugins
        is_left_out = is_optional and value == flag.default
        if flag.affects & set(effects) and not is_left_out:
            values[flag.name] = value
    return values
