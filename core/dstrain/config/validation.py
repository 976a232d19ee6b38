"""Check a configuration before anything is opened: values are in range, and no options
contradict each other.
"""

from dataclasses import replace

from dstrain.config.data_validation import (
    check_data,
    check_masks,
    check_places,
    check_sides,
)
from dstrain.config.datasets import datasets_of
from dstrain.config.fields import check_value
from dstrain.config.numbers import parse_alphas, parse_learning_rates, parse_ranks
from dstrain.config.options import (
    POLYNOMIAL_END,
    GenerateConfig,
    ModelChoice,
    TrainConfig,
)
from dstrain.config.plugin_options import changed, flags, flags_by_name, generator_of
from dstrain.config.plugin_records import records
from dstrain.config.serialize import MODEL_FILES
from dstrain.config.value_syntax import parse_model_paths, parse_origins, split_commas
from dstrain.errors import UsageError, about_dataset, nearest
from dstrain.installed import NamingPlugin

SHIFTED = ("shifted", "logit_normal", "mode")
NORMAL = ("logit_normal", "sigmoid")
ACT_WITH = (
    ("lr_scheduler_num_cycles", "lr_scheduler", ("cosine_with_restarts",)),
    ("lr_scheduler_power", "lr_scheduler", ("polynomial",)),
    ("timestep_shift", "timestep_sampling", SHIFTED),
    ("timestep_mean", "timestep_sampling", NORMAL),
    ("timestep_std", "timestep_sampling", NORMAL),
    ("min_snr_gamma", "loss_weighting", ("min_snr",)),
    ("huber_delta", "loss", ("huber",)),
    ("huber_schedule", "loss", ("huber",)),
)
"""Options that act only where another one has one of these values."""


def validate(config: ModelChoice) -> None:
    """Raise UsageError for a value out of its range, or for options that contradict
    each other; opens no file.
    """
    for flag in flags(type(config)):
        check_value(flag, getattr(config, flag.name))
    check_plugins(config)
    _check_model(config)
    if isinstance(config, TrainConfig):
        _check_task(config)
        _check_trainables(config)
        check_data(config)
        for number, entry in enumerate(config.dataset, 1):
            alone = replace(config, dataset_base_path=None, dataset=(entry,))
            (found,) = datasets_of(alone, number)
            with about_dataset(found.name):
                check_sides(found.config)
                check_data(found.config)
                check_masks(found.config, "unmasked_weight" in found.own)
        # With masks of its own, a dataset needs the run's options of masks.
        check_masks(config, not any(one.has_own_masks for one in datasets_of(config)))
        _check_optimizer(config)
        check_acting(config)
        _check_start(config)
        if not config.dry_run:
            if config.json:
                raise UsageError("--json", "has no effect without --dry_run")
            check_places(config)
    if isinstance(config, GenerateConfig):
        has_prompt = config.prompt is not None or generator_of(config)
        if not has_prompt:
            raise UsageError("--prompt", "is required: what to generate")


def check_plugins(config: ModelChoice) -> None:
    """Let plugins check their options; refuse those of a disabled one."""
    enabled = records(config.disabled_plugins)
    for record in records():
        own = [flag.name for flag in record.flags if flag.name in config.plugin_options]
        if record not in enabled and own:
            what = f"is of {record.plugin.name}, which -p disables"
            raise UsageError(f"--{own[0]}", what, "leave one of them out")
        if record in enabled and hasattr(record.options, "check"):
            with NamingPlugin(record.plugin.where, "the check of its options"):
                config.of(record.options).check(config)


def _check_model(config: ModelChoice) -> None:
    files = parse_model_paths(config.model_paths) + parse_origins(
        config.model_id_with_origin_paths
    )
    if not config.model:
        what = "is required: the family of the model, unless --model_id tells it"
        raise UsageError("--model", what)
    if config.model_id is not None and not config.model_id.strip():
        raise UsageError("--model_id", "is empty")
    given = [name for name in (*MODEL_FILES, "hub") if getattr(config, name)]
    if config.toy and given:
        what = f"builds its own model: --{given[0]} would not be read; give one of them"
        raise UsageError("--toy", what)
    if not (files or config.model_id or config.toy or config.dry_run):
        what = "no model files are given: a published model's id, a folder or a file"
        advice = "give --model_paths for single files, or --toy for a tiny model"
        raise UsageError("--model_id", what, advice)
    check_sides(config)


def _check_task(config: TrainConfig) -> None:
    name = config.task_name or "TASK"
    known = [name, f"{name}:data_process", f"{name}:train"]
    if config.task not in known:
        hint = nearest(config.task, known)
        what = f"{config.task!r} is not a task or one of its stages; expected {', '.join(known)}"
        raise UsageError("--task", what + hint)


def _check_trainables(config: TrainConfig) -> None:
    for name in ("trainable_models", "lora_base_model", "lora_target_modules"):
        text = getattr(config, name)
        if text is not None and not split_commas(text):
            raise UsageError(f"--{name}", "is empty")
    parse_ranks(config.lora_rank)
    parse_alphas(config.lora_alpha)
    trained = {name.partition(".")[0] for name in split_commas(config.trainable_models)}
    if both := trained & {*split_commas(config.lora_base_model)}:
        what = f"{min(both)} is also in --trainable_models"
        raise UsageError("--lora_base_model", what, "train it in full, or with LoRA")
    if trained and config.lora_base_model is None:
        for flag in changed(config, "LoRA"):
            raise UsageError(
                f"--{flag.name}",
                "has no effect: no LoRA is trained (--trainable_models trains full weights)",
                "name the component to add LoRA to with --lora_base_model",
            )


def _check_optimizer(config: TrainConfig) -> None:
    """Refuse a name in place of a path, and a rate that a schedule cannot have."""
    lowest = min(parse_learning_rates(config.learning_rate, 1.0).all)
    if config.lr_scheduler == "polynomial" and lowest <= POLYNOMIAL_END:
        what = f"is {lowest:g}, but polynomial ends at {POLYNOMIAL_END:g}"
        raise UsageError("--learning_rate", what)
    custom = config.customized_optimizer
    if custom is not None and "." not in custom:
        what = f"expected the dotted path of a class, got {custom!r}"
        advice = f"use --optimizer {custom}" if custom else "leave it out"
        raise UsageError("--customized_optimizer", what, advice)


def check_acting(config: TrainConfig) -> None:
    """Refuse settings of what is not chosen. What is the variant's to say, where it is
    left out, is None before the variant is known, and not looked at.
    """
    known = flags_by_name(TrainConfig)
    for name, other, values in ACT_WITH:
        is_given = name in config.typed or getattr(config, name) != known[name].default
        if is_given and getattr(config, other) not in (None, *values):
            what = f"has no effect without --{other} {' or '.join(values)}"
            raise UsageError(f"--{name}", what)


def _check_start(config: TrainConfig) -> None:
    """Refuse more than one of the ways to start."""
    ways = {
        "--resume resumes a run": config.resume,
        "--resume_from_checkpoint starts a new one from saved weights": config.resume_from_checkpoint,
        "--overwrite deletes the one in --output_path": config.overwrite,
    }
    chosen = [way for way, value in ways.items() if value]
    if len(chosen) > 1:
        flag = chosen[0].split()[0]
        raise UsageError(flag, ", and ".join(chosen), "give one of them")
