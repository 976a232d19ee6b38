"""Stage 2 finds the plan it asks for, or names what differs and how to fill it."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, Task, run

from tests.support.runs import config, same
from tests.support.stage_project import Project


def test_a_folder_without_a_finished_plan_is_refused_with_the_command_that_fills_it(
    filled: Project,
) -> None:
    for path in (filled.folder / "cache/plans").iterdir():
        path.unlink()
    for cache in (filled.folder / "cache", filled.folder / "none"):
        with pytest.raises(StateError) as caught:
            filled.stage_2(feature_cache=cache)
        assert (caught.value.exit_code, caught.value.where) == (3, str(cache))
        advice = "\n".join(caught.value.help_lines)
        assert "--task sft:data_process" in advice
        assert f"--feature_cache {cache}" in advice
    with pytest.raises(StateError, match=r"is the cache here: .*name a cache with --f"):
        filled.stage_2(feature_cache=None)


@pytest.mark.parametrize(
    ("asked", "differing"),
    [
        ({"variant": "other"}, ["variant: cache base, this run other"]),
        (
            {"height": 16, "width": 16},
            ["--height: cache None, this run 16", "--width: cache None, this run 16"],
        ),
        ({"max_pixels": 4096}, ["--max_pixels: cache 1048576, this run 4096"]),
        ({"mixed_precision": "bf16"}, ["dtype: cache float32, this run bfloat16"]),
        ({"data_file_keys": "image"}, ["--data_file_keys: cache None, this run image"]),
    ],
)
def test_a_cache_of_another_plan_is_refused_by_what_differs(
    asked: dict[str, Any], differing: list[str], filled: Project
) -> None:
    said = filled.refusal(**asked)
    assert [words for words in differing if words not in said] == []


def test_rows_that_a_run_cannot_train_on_are_another_plan(filled: Project) -> None:
    path = filled.data / "metadata.json"
    path.write_text(json.dumps([{"prompt": "dog"}]))
    cache = {"feature_cache": filled.folder / "words"}
    words = Task.of("words", lambda predict: predict)
    run(config(filled.folder, task="words:data_process", **cache), tasks=[words])
    path.unlink()
    assert "task: cache words, this run sft" in filled.refusal(**cache)


@pytest.mark.parametrize(
    "flags",
    [
        {"learning_rate": 1.0, "num_epochs": 3, "dataset_repeat": 9, "batch_size": 4},
        {"use_gradient_checkpointing": True, "min_timestep_boundary": 0.2, "seed": 3},
        {"dataset_num_workers": 2, "gradient_accumulation_steps": 4},
    ],
)
def test_flags_of_training_alone_are_no_part_of_a_plan(
    flags: dict[str, Any], filled: Project
) -> None:
    assert same(filled.stage_2(**flags), filled.unsplit(**flags))


def test_the_newest_fill_of_a_dataset_is_used(filled: Project) -> None:
    path = filled.data / "metadata.json"
    whole, rows = path.read_text(), json.loads(path.read_text())
    first = filled.stage_2()
    path.write_text(json.dumps(rows[:2]))
    filled.fill()
    path.unlink()
    second = filled.stage_2()
    assert len(second["log"]) == 2
    path.write_text(whole)
    assert same(filled.stage_2(), first)
    filled.fill()
    path.unlink()
    assert same(filled.stage_2(), first)
    assert len(list((filled.folder / "cache/plans").glob("*.json"))) == 2


def test_values_that_are_gone_are_counted_before_training(filled: Project) -> None:
    shards = filled.folder / "cache/shards"
    images = {*shards.iterdir()}
    table = filled.data / "metadata.json"
    table.write_text(table.read_text().replace('"prompt": "', '"prompt": "my '))
    filled.fill()
    for gone in (images, {*shards.iterdir()} - images):
        assert gone
        for path in gone:
            path.rename(path.with_suffix(".gone"))
        said = filled.refusal()
        assert " 3 of 3 rows" in said and "metadata.json:1" in said
        for path in gone:
            path.with_suffix(".gone").rename(path)


def test_what_stage_1_records_keeps_the_names_of_the_format(filled: Project) -> None:
    (path,) = (filled.folder / "cache/plans").glob("*.json")
    about = json.loads(path.read_bytes())["record"]["about"]
    assert list(about) == [
        *("dataset", "columns", "inputs", "components", "configs", "models"),
        *("files", "versions", "prompt_rows", "sizes", "config", "repeatable"),
    ]
    assert about["dataset"]["rows"] == 3
    assert Path(about["dataset"]["path"]) == filled.data / "metadata.json"
