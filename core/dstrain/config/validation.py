"""Check a configuration before anything is opened: values are in range, and no options
contradict each other.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from dstrain.config.datasets import datasets_of
from dstrain.config.fields import (
    check_value,
    parse_model_paths,
    parse_origins,
    split_commas,
)
from dstrain.config.numbers import (
    parse_alphas,
    parse_frames,
    parse_learning_rates,
    parse_ranks,
    parse_resolutions,
)
from dstrain.config.options import (
    POLYNOMIAL_END,
    GenerateConfig,
    ModelChoice,
    TrainConfig,
)
from dstrain.config.plugin_options import changed, flags, generator_of, records
from dstrain.config.serialize import MODEL_FILES
from dstrain.errors import UsageError, about_dataset, nearest

NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "validation_dataset_metadata_path": ("validation_dataset_base_path",),
        "validation_steps": ("validation_split", "validation_dataset_base_path"),
        "preset_lora_model": ("preset_lora_path",),
        "bucket_step": ("resolution",),
        "bucket_min_side": ("resolution",),
        "bucket_max_side": ("resolution",),
        "bucket_upscale": ("resolution",),
        "keep_tags": ("shuffle_tags",),
        "caption_variants": ("shuffle_tags",),
    }
)
"""Option -> those of which it needs one to have an effect."""
EITHER = (
    ("validation_split", "validation_dataset_base_path"),
    ("resolution", "height"),
    ("resolution", "width"),
    ("resolution", "max_pixels"),
    ("alpha_mask", "mask_column"),
    ("customized_optimizer", "optimizer"),
)
"""Options that exclude each other."""


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
        _check_data(config)
        for number, entry in enumerate(config.dataset, 1):
            alone = replace(config, dataset_base_path=None, dataset=(entry,))
            (found,) = datasets_of(alone, number)
            with about_dataset(found.name):
                _check_sides(found.config)
                _check_data(found.config)
                _check_masks(found.config, "unmasked_weight" in found.own)
        # With masks of its own, a dataset needs the run's options of masks.
        _check_masks(config, not any(one.has_own_masks for one in datasets_of(config)))
        _check_optimizer(config)
        _check_start(config)
        if not config.dry_run:
            if config.json:
                raise UsageError("--json", "has no effect without --dry_run")
            _check_places(config)
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
    given = [name for name in MODEL_FILES if getattr(config, name)]
    has_files = bool(files) or config.model_id is not None
    if config.toy and has_files:
        what = f"builds its own model: --{given[0]} would not be read; give one of them"
        raise UsageError("--toy", what)
    if config.toy and config.hub is not None:
        raise UsageError("--hub", "has no effect: --toy builds its own model")
    if not has_files and not config.toy and not config.dry_run:
        what = "no model files are given: a published model's id, a folder or a file"
        advice = "give --model_paths for single files, or --toy for a tiny model"
        raise UsageError("--model_id", what, advice)
    _check_sides(config)


def _check_sides(config: ModelChoice) -> None:
    for one, other in (("height", "width"), ("width", "height")):
        if getattr(config, one) is not None and getattr(config, other) is None:
            what = f"is given without --{other}; give both, or neither"
            raise UsageError(f"--{one}", what)


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
    if config.lora_base_model in trained:
        what = f"{config.lora_base_model} is also in --trainable_models"
        reason = "a component is trained either in full or with LoRA"
        raise UsageError("--lora_base_model", f"{what}; {reason}")
    if trained and config.lora_base_model is None:
        for flag in changed(config, "LoRA"):
            raise UsageError(
                f"--{flag.name}",
                "has no effect: no LoRA is trained (--trainable_models trains full weights)",
                "name the component to add LoRA to with --lora_base_model",
            )


def _check_data(config: TrainConfig) -> None:
    """Refuse options that exclude each other, or are given without those that they go
    together with.
    """
    given = {
        flag.name
        for flag in flags(TrainConfig)
        if getattr(config, flag.name) not in (flag.default, None)
    }
    for name, needed in NEEDED.items():
        if name in given and given.isdisjoint(needed):
            without = " or ".join(f"--{one}" for one in needed)
            raise UsageError(f"--{name}", f"has no effect without {without}")
    for name, other in EITHER:
        if given.issuperset((name, other)):
            what = f"cannot be combined with --{other}; give one of them"
            raise UsageError(f"--{name}", what)
    if config.use_gradient_checkpointing is False and config.checkpoints:
        what = "cannot be combined with --use_gradient_checkpointing_offload"
        raise UsageError("--no_use_gradient_checkpointing", what)
    if config.lr_warmup_steps and config.lr_scheduler == "constant":
        what = "has no effect: --lr_scheduler constant has no warm-up"
        advice = "use --lr_scheduler constant_with_warmup"
        raise UsageError("--lr_warmup_steps", what, advice)
    if config.lr_scheduler == "constant_with_warmup" and not config.lr_warmup_steps:
        what = "constant_with_warmup needs --lr_warmup_steps"
        raise UsageError("--lr_scheduler", what)
    is_uniform = config.frame_sampling == "uniform"
    if is_uniform != (config.frame_samples is not None):
        what = "goes together with --frame_sampling uniform"
        raise UsageError("--frame_samples", what, "give both, or neither")
    parse_resolutions(config.resolution)
    parse_frames(config.num_frames)
    least, greatest = config.bucket_min_side, config.bucket_max_side
    if least is not None and greatest is not None and least > greatest:
        what = f"is {least}, more than --bucket_max_side {greatest}"
        raise UsageError("--bucket_min_side", what)


def _check_masks(config: TrainConfig, needs_masks: bool) -> None:
    """Refuse, if it needs masks, a weight of what these leave out without any."""
    if config.mask_column is not None and not config.mask_column.strip():
        raise UsageError("--mask_column", "is empty")
    if needs_masks and config.mask_column is None and not config.alpha_mask:
        for flag in changed(config, "mask"):
            what = "has no effect without --mask_column or --alpha_mask"
            raise UsageError(f"--{flag.name}", what)


def _check_optimizer(config: TrainConfig) -> None:
    """Refuse a name in place of a path, and settings of a schedule that is not chosen, or
    that it cannot have.
    """
    lowest = min(parse_learning_rates(config.learning_rate, 1.0).all)
    if config.lr_scheduler == "polynomial" and lowest <= POLYNOMIAL_END:
        what = f"is {lowest:g}, but polynomial ends at {POLYNOMIAL_END:g}"
        raise UsageError("--learning_rate", what)
    custom = config.customized_optimizer
    if custom is not None and "." not in custom:
        what = f"expected the dotted path of a class, got {custom!r}"
        advice = f"use --optimizer {custom}" if custom else "leave it out"
        raise UsageError("--customized_optimizer", what, advice)
    for name, schedule in (
        ("lr_scheduler_num_cycles", "cosine_with_restarts"),
        ("lr_scheduler_power", "polynomial"),
    ):
        if getattr(config, name) is not None and config.lr_scheduler != schedule:
            what = f"has no effect without --lr_scheduler {schedule}"
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


def _check_places(config: TrainConfig) -> None:
    """Refuse a run that does not know what to read, or where to write.

    Without --feature_cache the cache is stage 1's output and stage 2's dataset.
    """
    for name, meaning, stage in (
        ("dataset_base_path", "the dataset folder", "train"),
        ("output_path", "the folder for checkpoints and logs", "data_process"),
    ):
        is_cache = config.stage == stage
        is_given = getattr(config, name) is not None
        if name == "dataset_base_path" and config.dataset:
            continue
        if not is_given and not (is_cache and config.feature_cache is not None):
            what = f"is required: {meaning}"
            if is_cache:
                what += ", or --feature_cache: the folder of the feature cache"
            task = f"{config.task_name}:train"
            advice = f"to train from a full feature cache alone, give --task {task}"
            tells = name == "dataset_base_path" and config.runs_both_stages
            raise UsageError(f"--{name}", what, *[advice][: int(tells)])
    bases = [one.config.dataset_base_path for one in datasets_of(config)]
    bases.append(config.validation_dataset_base_path)
    data = {os.path.realpath(base) for base in bases if base is not None}
    for name in ("output_path", "feature_cache"):
        place = getattr(config, name)
        is_read = name == "feature_cache" and config.stage == "train"
        if place is not None and not is_read and os.path.realpath(place) in data:
            what = f"{place} is the folder of a dataset; give another one, inside it or elsewhere"
            raise UsageError(f"--{name}", what)
