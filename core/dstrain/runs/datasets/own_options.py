"""The options that datasets have of their own, as far as the numbers of a run depend on
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dstrain.config import dataset_flags, datasets_of
from dstrain.config.datasets import (
    ALPHA_MASK,
    LOSS_WEIGHT,
    MASK_COLUMN,
    REPEATS,
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


def with_recorded(config: TrainConfig, recorded: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with the datasets of a run that was recorded as JSON, and
    with what that run's options say of them.
    """
    changes: dict[str, Any] = {"dataset": tuple(recorded.get("dataset", ()))}
    for name in _deciding():
        if name in recorded:
            value = recorded[name]
            changes[name] = tuple(value) if isinstance(value, list) else value
    return replace(config, **changes)


def differing_options(
    saved: TrainConfig, now: TrainConfig
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the options of datasets that decide the numbers of a run and differ, each as
    '--dataset 2: flip' with both values; where one run has more datasets, how many.
    """
    olds, news = _entries(saved), _entries(now)
    if len(olds) != len(news):
        yield "--dataset", len(olds), len(news)
        return
    for old, new in zip(olds, news, strict=True):
        before = {**_values(old.config), **_drawn(old)}
        after = {**_values(new.config), **_drawn(new)}
        own = old.own | new.own | {REPEATS, LOSS_WEIGHT}
        if own & OF_MASKS:
            own |= OF_MASKS  # one kind turns off the other
        for name, value in after.items():
            # What neither has of its own is the run's, and is named as that.
            if name in own and before[name] != value:
                yield f"{new.name}: {name}", before[name], value


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


def _drawn(one: DatasetOptions) -> dict[str, Any]:
    return {REPEATS: one.repeats, LOSS_WEIGHT: one.loss_weight}
