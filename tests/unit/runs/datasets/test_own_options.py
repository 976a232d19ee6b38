"""Which options of datasets decide a run's numbers, and how two runs differ in them."""

import json
from typing import Any

from dstrain import TrainConfig
from dstrain.config import as_flags
from dstrain.runs.datasets.own_options import (
    differing_options,
    other_options,
    with_recorded,
)


def config(*datasets: dict[str, Any], **changes: Any) -> TrainConfig:
    entries = [json.dumps({"dataset_base_path": "more", **one}) for one in datasets]
    return TrainConfig(model="tiny", dataset=tuple(entries), **changes)


def test_options_that_are_those_of_the_run_are_none_of_a_dataset() -> None:
    assert other_options(config()) == {}
    assert other_options(config({}, {"repeats": 2, "flip": True}, flip=True)) == {}


def test_a_dataset_has_what_decides_numbers_and_not_where_it_is() -> None:
    own = {"dataset_metadata_path": "rows.csv", "flip": True, "mask_column": "mask"}
    columns = {"column": ["prompt=text,input_image=photo"], "default_caption": "x"}
    assert other_options(config({}, own, columns)) == {
        "--dataset 2": {"flip": True},
        "--dataset 3": {
            "column": ["input_image=photo", "prompt=text"],
            "default_caption": "x",
        },
    }


def difference(saved: TrainConfig, now: TrainConfig) -> dict[str, Any]:
    recorded = json.loads(json.dumps(as_flags(saved)))
    before = with_recorded(now, recorded)
    return {place: both for place, *both in differing_options(before, now)}


def test_the_dataset_and_the_option_that_differ_are_named() -> None:
    saved = config({"flip": True, "repeats": 2}, {"alpha_mask": True})
    now = config({"trigger_word": "sks"}, {"mask_column": "mask"})
    assert difference(saved, now) == {
        "--dataset 1: flip": [True, False],
        "--dataset 1: trigger_word": [None, "sks"],
        "--dataset 1: repeats": [2, 1],
        "--dataset 2: mask_column": [None, "mask"],
        "--dataset 2: alpha_mask": [True, False],
    }
    assert difference(saved, saved) == {}


def test_an_option_of_the_run_is_none_of_its_datasets() -> None:
    assert difference(config({}, flip=True), config({})) == {}
    assert difference(config({}, mask_column="mask"), config({})) == {}
    # A dataset may have of its own what the run had for all.
    now = config({"flip": True})
    assert difference(config({}, flip=True), now) == {}
    assert difference(config({}), now) == {"--dataset 1: flip": [False, True]}


def test_more_datasets_are_counted() -> None:
    assert difference(config({}), config({}, {})) == {"--dataset": [1, 2]}
    assert difference(config(), config({})) == {"--dataset": [0, 1]}
