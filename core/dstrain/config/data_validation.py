"""Check the options of datasets, sizes, masks and places against each other."""

import os
from collections.abc import Mapping
from types import MappingProxyType

from dstrain.config.datasets import datasets_of
from dstrain.config.numbers import parse_frames, parse_resolutions
from dstrain.config.options import ModelChoice, TrainConfig
from dstrain.config.plugin_options import changed, flags
from dstrain.errors import UsageError

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


def check_sides(config: ModelChoice) -> None:
    """Refuse one of the sides without the other."""
    for one, other in (("height", "width"), ("width", "height")):
        if getattr(config, one) is not None and getattr(config, other) is None:
            what = f"is given without --{other}; give both, or neither"
            raise UsageError(f"--{one}", what)


def check_data(config: TrainConfig) -> None:
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


def check_masks(config: TrainConfig, needs_masks: bool) -> None:
    """Refuse, if it needs masks, a weight of what these leave out without any."""
    if config.mask_column is not None and not config.mask_column.strip():
        raise UsageError("--mask_column", "is empty")
    if needs_masks and config.mask_column is None and not config.alpha_mask:
        for flag in changed(config, "mask"):
            what = "has no effect without --mask_column or --alpha_mask"
            raise UsageError(f"--{flag.name}", what)


def check_places(config: TrainConfig) -> None:
    """Refuse a run that does not know what to read, or where to write: without
    --feature_cache the cache is stage 1's output and stage 2's dataset.
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
