"""A dry run of what the feature cache has looks at no row, and says what it would say if it
did; of stage 2 it knows the steps exactly.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import run
from dstrain.cli.main import main
from dstrain.runs import open_training_data
from dstrain.runs.build import choose_validation
from dstrain.runs.dry_run import planned_rows
from dstrain.runs.dry_run.summary import as_summary
from dstrain.runs.resolve import resolve
from dstrain.storage import file_memory, hashing
from dstrain.training import Order

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny", "wide_page")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What makes the configuration of a run whose feature cache is complete."""
    monkeypatch.setattr(hashing, "SETTLED", 0)
    monkeypatch.setattr(file_memory, "SETTLED", 0)
    project(tmp_path)

    def of(stage: str, **flags: Any) -> Any:
        task = f"sft:{stage}"
        return config(tmp_path, task=task, feature_cache=tmp_path / "cache", **flags)

    run(of("data_process", preview_prompt=("a cat",)))
    return of


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("rows are read")


def test_stage_1_with_nothing_to_do_reads_no_row_and_says_the_same(
    cached: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"preview_prompt": ("a cat",), "dry_run": True}

    def said() -> str:
        return as_summary(resolve(cached("data_process", **flags)))

    with monkeypatch.context() as patch:
        patch.setattr(planned_rows, "find_unchanged", lambda *_, **__: [])
        want = said()
    with monkeypatch.context() as patch:
        for name in ("read_table", "check_rows", "largest_sample"):
            patch.setattr(planned_rows, name, refuse)
        patch.setattr("dstrain.runs.setup.open_dataset", refuse)
        assert said() == want
    assert "6 rows in" in want
    assert "the largest sample, metadata.json:" in want


def test_another_caption_is_seen(
    cached: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "data/metadata.json"
    metadata.write_text(metadata.read_text().replace("bridge", "road"))
    monkeypatch.setattr(planned_rows, "read_table", refuse)
    with pytest.raises(AssertionError, match="rows are read"):
        as_summary(resolve(cached("data_process", preview_prompt=("a cat",))))


@pytest.mark.parametrize("flags", [{}, {"validation_split": 0.3}, {"batch_size": 4}])
def test_stage_2_has_the_rows_and_steps_of_the_feature_cache(
    cached: Callable[..., Any], flags: dict[str, Any]
) -> None:
    setup = resolve(cached("train", dry_run=True, **flags))
    said = as_summary(setup)
    data = open_training_data(setup)
    groups, validation = choose_validation(setup, data)
    batch = setup.config.batch_size
    order = Order(groups, 1, batch, setup.config.seed, data.sample_ids)
    assert f"    {order.steps_per_epoch} steps\n" in said
    assert "if each row is one sample" not in said
    assert f"    6 rows in {setup.config.dataset_base_path} x 1\n" in said
    held_out = len(validation.sample_ids)
    assert (f"    {held_out} of these for validation" in said) is bool(
        flags.get("validation_split")
    )


def test_stage_2_without_values_for_a_preview_is_refused_as_by_the_run(
    cached: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *("--model", "tiny", "--variant", "base", "--task", "sft:train", "--dry_run"),
        *("--feature_cache", str(tmp_path / "cache")),
        *("--output_path", str(tmp_path / "out"), "--preview_prompt", "a horse"),
        *("--model_paths", str(cached("train").model_paths)),
    ]
    assert main(words) == 3
    said = capsys.readouterr().err
    assert "contains no values for previews of 'a horse'" in said


def test_a_command_of_both_stages_says_what_stage_1_computes_and_the_steps_of_stage_2(
    cached: Callable[..., Any], tmp_path: Path
) -> None:
    flags = {"preview_prompt": ("a cat",), "dry_run": True, "batch_size": 4}
    alone = as_summary(resolve(cached("train", **flags)))

    def said(**more: Any) -> str:
        typed = replace(cached("train", **flags), task="sft", **more)
        return as_summary(resolve(typed))

    cache = tmp_path / "cache"
    assert f"    stage 1 computes what {cache} lacks of 6 rows\n" in said()
    new = tmp_path / "new"
    assert f"    stage 1 computes 6 rows into {new}\n" in said(feature_cache=new)
    assert not new.exists()
    run(cached("data_process", **{**flags, "dry_run": False}))
    full = said()
    assert f"stage 1 computes nothing: {cache} has the values of all rows" in full
    # Two sizes of three rows each, of which a step has four: that needs their files.
    steps = re.findall(r"    \d+ steps.*\n", alone)
    assert steps == ["    2 steps\n"] and steps[0] in full
    assert "to fetch" not in full
