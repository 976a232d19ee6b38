"""The masks of the loss that the options of a run, and those of its datasets, ask for."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dstrain.config import datasets_of
from dstrain.config.options import TrainConfig
from dstrain.errors import about_dataset
from dstrain.graph import PipelineSpec, Task
from dstrain.pipeline import Masks, with_masks, with_masks_of_dataset


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
