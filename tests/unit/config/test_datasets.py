"""Several datasets: each is the run's options with its own in their place."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig, UsageError
from dstrain.cli.main import main
from dstrain.config import datasets_of

from tests.support.command_lines import BASE, toy_config


def entry(**options: Any) -> str:
    return json.dumps({"dataset_base_path": "more", **options})


def test_each_table_has_its_own_options_and_the_others_of_the_run() -> None:
    config = toy_config(
        dataset_metadata_path=Path("data/rows.csv"),
        flip=True,
        max_pixels=4096,
        dataset=(
            entry(repeats=10**6, resolution=512, caption_dropout="0.1", flip="false"),
            entry(**{"loss-weight": 0, "column": "prompt=text", "keep_tags": "2"}),
        ),
    )
    first, second, third = datasets_of(config)
    assert first.config.dataset_metadata_path == Path("data/rows.csv")
    assert all(one.config.dataset == () for one in (first, second, third))
    assert (second.repeats, second.loss_weight) == (10**6, 1.0)
    own = second.config
    assert (own.resolution, own.caption_dropout, own.flip) == ("512", 0.1, False)
    # The metadata of one dataset is that of no other.
    assert (own.dataset_metadata_path, own.max_pixels) == (None, 4096)
    assert (third.repeats, third.loss_weight) == (1, 0)
    assert (third.config.column, third.config.keep_tags) == (("prompt=text",), 2)
    assert third.config.flip


def test_a_dataset_is_known_by_its_number_and_its_own_options() -> None:
    first, second = datasets_of(toy_config(dataset=(entry(crops=2),)))
    assert (first.name, first.own) == ("", frozenset())
    assert second.name == "--dataset 1"
    assert second.own == {"dataset_base_path", "crops"}


@pytest.mark.parametrize(
    ("value", "expected"), [(17, 17), ("17", 17), ("17,33", "17,33")]
)
def test_a_dataset_has_numbers_of_frames(value: int | str, expected: int | str) -> None:
    _, found = datasets_of(toy_config(dataset=(entry(num_frames=value),)))
    # One number is a number, as that of a run: what is recorded of both is equal.
    assert found.config.num_frames == expected
    assert type(found.config.num_frames) is type(expected)


@pytest.mark.parametrize(
    ("text", "where", "named"),
    [
        ("{", "", "line 1"),
        ("3", "", "."),
        ("[" * 99999, "", "."),
        (entry(fliip=True), "", "'fliip'.*'flip'"),
        (entry(seed=1), "", "'seed'"),
        (entry(repeats=0), "repeats", "1"),
        (entry(repeats="two"), "repeats", "'two'"),
        (entry(loss_weight=-1), "loss_weight", "0.0"),
        (entry(flip=1), "flip", "bool"),
        (entry(resolution=True), "resolution", "str"),
        (entry(repeats=10**6 + 1), "repeats", "1000000"),
        (entry(crops=1.5), "crops", "int"),
        (entry(frame_sampling="tail"), "frame_sampling", "head"),
        (entry(dataset_base_path=""), "dataset_base_path", "."),
        ("{}", "dataset_base_path", "."),
        (entry(dataset_base_path=None), "dataset_base_path", "."),
        ('{"flip": true, "flip": false}', "flip", "True.*False"),
        ('{"keep-tags": 1, "keep_tags": 2}', "keep_tags", "1.*2"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(text: str, where: str, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        datasets_of(toy_config(dataset=(text,)))
    assert caught.value.where == ": ".join(filter(None, ["--dataset 1", where]))


def test_paths_that_are_repeated_become_datasets(runs: list[TrainConfig]) -> None:
    words = ["--dataset-base-path=b c", "--flip", "--dataset_base_path", "d"]
    assert main([*BASE, *words, "--dataset_repeat", "2"]) == 0
    (config,) = runs
    assert (config.dataset_base_path, config.flip) == (Path("data"), True)
    assert config.dataset_repeat == 2
    assert [json.loads(one) for one in config.dataset] == [
        {"dataset_base_path": "b c"},
        {"dataset_base_path": "d"},
    ]
