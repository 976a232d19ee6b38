"""The options that datasets have of their own, as far as the numbers of a run depend on
them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dstrain.config import dataset_flags, datasets_of
from dstrain.config.datasets import (
    ALPHA_MASK,
    MASK_COLUMN,
    DatasetOptions,
)
from dstrain.config.options import TrainConfig, options_affecting
from dstrain.data.forms import parse_columns

COLUMN = "column"
OF_MASKS = frozenset({MASK_COLUMN, ALPHA_MASK, "unmasked_weight"})
"""Options whose values `other_masks` has."""


def other_options(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the datasets, by their names, some of whose options decide the numbers of a
    run and are not those of the run, with the values of these; without those of masks.
    """
    found: dict[str, dict[str, Any]] = {}
    run = _values(config)
    for one in _entries(config):
        values = _values(one.config)
        other = {
            name: value
            for name, value in values.items()
            if name not in OF_MASKS and value != run[name]
        }
        if other:
            found[one.name] = other
    return found


def _entries(config: TrainConfig) -> Sequence[DatasetOptions]:
    # Stage 2 need not name the dataset of --dataset_base_path, whose options are the run's.
    entries = replace(config, dataset_base_path=None)
    return datasets_of(entries) if config.dataset else ()


def _deciding() -> list[str]:
    deciding = options_affecting("training", "resolved")
    return [name for name in dataset_flags() if name in deciding]


def _values(config: TrainConfig) -> dict[str, Any]:
    """Return the options that decide numbers, each as one of the ways in which it can be
    written.
    """
    values = {name: getattr(config, name) for name in _deciding()}
    columns = parse_columns(config.column)
    values[COLUMN] = [f"{name}={columns[name]}" for name in sorted(columns)]
    return values
