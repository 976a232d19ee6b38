"""A configuration becomes a setup, which both of its stages share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain.distributed import Sharding
from dstrain.runs.resolve import of_stage, resolve, with_defaults

from tests.support import family as tiny
from tests.support.command_lines import toy_config
from tests.support.runs import config, project


@pytest.mark.usefixtures("tiny")
def test_stages_share_what_was_resolved_and_nothing_that_was_read(
    tmp_path: Path,
) -> None:
    both = resolve(config(project(tmp_path), feature_cache=tmp_path / "cache"))
    both = replace(both, sharding=Sharding())
    stage_1, stage_2 = of_stage(both, "data_process"), of_stage(both, "train")
    _ = both.dataset, stage_1.dataset
    assert "dataset" not in vars(stage_2)
    assert stage_1.extensions is stage_2.extensions is both.extensions
    assert (stage_1.spec, stage_1.trainables) == (stage_2.spec, stage_2.trainables)
    # Stage 1 trains nothing.
    assert (stage_1.sharding, stage_2.sharding) == (None, both.sharding)
    assert stage_1.cache_path == stage_1.output == stage_2.cache_path
    assert stage_2.output == tmp_path / "out"


CHECKPOINTED = replace(tiny.MODEL, gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("flags", "checkpoints"),
    [
        ({}, True),
        ({"task": "sft:data_process"}, True),
        ({"use_gradient_checkpointing": False}, False),
        ({"blocks_to_swap": 1}, True),
    ],
)
def test_a_family_checkpoints_unless_told_otherwise(
    flags: dict[str, Any], checkpoints: bool
) -> None:
    assert with_defaults(toy_config(**flags), CHECKPOINTED).checkpoints == checkpoints


def test_other_families_do_not() -> None:
    assert with_defaults(toy_config(), tiny.MODEL).use_gradient_checkpointing is None


def test_the_hub_of_the_environment_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DIFFSYNTH_DOWNLOAD_SOURCE", "huggingface")
    named = toy_config(toy=False, model_id="a/b")
    assert with_defaults(named, tiny.MODEL).hub == "huggingface"
    assert (
        with_defaults(replace(named, hub="modelscope"), tiny.MODEL).hub == "modelscope"
    )
    assert with_defaults(toy_config(), tiny.MODEL).hub is None  # downloads nothing
