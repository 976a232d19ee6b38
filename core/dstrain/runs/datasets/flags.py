"""How datasets are read, and which masks they have, as the options of a run say."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from dstrain.config import datasets_of, split_commas
from dstrain.config.numbers import parse_frames, parse_resolutions
from dstrain.config.options import TrainConfig
from dstrain.console import secrets
from dstrain.data import CaptionOptions, DataConfig, Resolution
from dstrain.data.buckets import Buckets
from dstrain.data.clips import FrameSampling
from dstrain.data.tables import installed_forms, parse_columns
from dstrain.data.variants import TRIGGER, AugmentationOptions
from dstrain.errors import UsageError, about_dataset, secret_error
from dstrain.graph import Column, PipelineSpec, Task
from dstrain.pipeline import Masks, with_masks, with_masks_of_dataset
from dstrain.registry import PromptRow, load_family

ORDERS = 8
"""Orders of tags that --shuffle_tags takes turns with by default."""


def data_config(
    config: TrainConfig, spec: PipelineSpec, is_validation: bool = False
) -> DataConfig:
    """Return where a dataset is and how it is read; raises UsageError without a folder.

    is_validation: Whether it is the one that is not trained on, whose captions and
        images are what they are.
    """
    if not config.dataset_base_path:
        what = "is required: the dataset folder"
        raise UsageError("--dataset_base_path", what)
    resolutions = resolutions_of(config)
    captions = CaptionOptions(
        split_lines=config.caption_lines,
        trigger=config.trigger_word or "",
        prefix=config.caption_prefix or "",
        suffix=config.caption_suffix or "",
    )
    augmentation = AugmentationOptions()
    if not is_validation:
        augmentation = AugmentationOptions(config.flip, config.crops)
        captions = replace(
            captions,
            dropout=config.caption_dropout,
            shuffle_tags=config.shuffle_tags,
            keep_tags=config.keep_tags or 0,
            variants=config.caption_variants or ORDERS,
        )
    return DataConfig(
        base_path=config.dataset_base_path,
        metadata_path=config.dataset_metadata_path,
        file_keys=file_keys(config, spec) if config.data_file_keys else None,
        resolution=resolutions[0],
        further_resolutions=resolutions[1:],
        extra_inputs=split_commas(config.extra_inputs),
        sampling=FrameSampling(
            most_frames(config),
            config.frame_sampling,
            config.frame_samples or 1,
            parse_frames(config.num_frames)[:-1],
        ),
        roots=config.dataset_root,
        forms=installed_forms(config),
        form=config.dataset_form,
        on_bad_sample=config.on_bad_sample,
        pads_texts=bool(spec.padded),
        captions=captions,
        caption_inputs=caption_inputs(spec),
        augmentation=augmentation,
        columns=parse_columns(config.column),
        default_caption=config.default_caption,
    )


def file_keys(config: TrainConfig, spec: PipelineSpec) -> tuple[str, ...]:
    """Return the columns whose files are loaded, without those that only other variants of
    the family have: one command may name the columns of several.
    """
    keys = split_commas(config.data_file_keys)
    own = files_of(spec)
    if not spec.family or own.issuperset(keys):
        return keys
    family = load_family(spec.family, config.disabled_plugins)
    others = {name for one in family.variants for name in files_of(family.spec(one))}
    return tuple(key for key in keys if key in own or key not in others)


def files_of(spec: PipelineSpec) -> set[str]:
    """Return the columns of a variant that name files."""
    columns = (one for one in spec.inputs.values() if isinstance(one, Column))
    return {column.name for column in columns if column.is_file}


def caption_inputs(spec: PipelineSpec) -> frozenset[str]:
    """Return the inputs that are captions: the prompt, and other text that guidance has a
    counterpart of.
    """
    return frozenset(
        name
        for name in ("prompt", *spec.cfg_inputs)
        if isinstance(source := spec.inputs.get(name), Column) and source.kind == "text"
    )


def with_trigger(
    config: TrainConfig, rows: Iterable[PromptRow]
) -> tuple[PromptRow, ...]:
    """Return rows with the word that was trained in place of [trigger]: that of the run,
    else that of the first dataset that has one of its own. Raises UsageError for a
    prompt with a secret, since it is written down.
    """
    datasets = (one.config for one in datasets_of(config))
    words = [one.trigger_word for one in (config, *datasets)]
    word = next(filter(None, words), "")
    found = []
    for row in rows:
        for value, name in secrets().items():
            if value in row.text:
                raise secret_error(row.option, name)
        # Of a recipe, that may have no word.
        text, prompt = (one.replace(TRIGGER, word) for one in (row.text, row.prompt))
        found.append(replace(row, text=text, prompt=prompt))
    return tuple(found)


def most_frames(config: TrainConfig) -> int:
    """Return the frames of a clip, the most of --num_frames."""
    return parse_frames(config.num_frames)[-1]


def resolutions_of(config: TrainConfig) -> tuple[Resolution, ...]:
    """Return the sizes at which each row gives a sample: --height and --width,
    --max_pixels, or the buckets of each --resolution.
    """
    fixed = Resolution(config.height, config.width, config.max_pixels)
    found = []
    for side in parse_resolutions(config.resolution):
        buckets = Buckets(
            side,
            config.bucket_step,
            config.bucket_min_side,
            config.bucket_max_side,
            config.bucket_upscale,
        )
        found.append(replace(fixed, buckets=buckets))
    return tuple(found) or (fixed,)


def masks_of(config: TrainConfig) -> Masks:
    """Return the masks that the options of a run, or of one dataset, ask for."""
    return Masks(config.mask_column, config.alpha_mask, config.unmasked_weight)


def with_masks_of_run(
    spec: PipelineSpec, task: Task, config: TrainConfig
) -> PipelineSpec:
    """Return the variant with masks if the run or one of its datasets asks for any: its
    input is that of the first that does. Each dataset is read with its own.

    Raises UsageError for masks that a dataset cannot have.
    """
    own = masks_of(config)
    masked = with_masks(spec, task, own)
    for dataset, masks in _masks_of_datasets(config):
        with about_dataset(dataset):
            if masked is spec:
                weight = own.unmasked_weight
                masked = with_masks(spec, task, replace(masks, unmasked_weight=weight))
            with_masks_of_dataset(masked, masks)
    return masked


def other_masks(config: TrainConfig) -> dict[str, list[Any]]:
    """Return the datasets, by their names, whose masks are not those of the run, with the
    column, the kind and the weight of what is masked out.
    """
    run = masks_of(config)
    return {
        dataset: [own.column, own.is_alpha, own.unmasked_weight]
        for dataset, own in _masks_of_datasets(config)
        if own != run
    }


def _masks_of_datasets(config: TrainConfig) -> Iterator[tuple[str, Masks]]:
    if config.dataset:
        # Stage 2 need not name the dataset of --dataset_base_path.
        for one in datasets_of(replace(config, dataset_base_path=None)):
            yield one.name, masks_of(one.config)
