"""Flags that have no effect are refused, or logged where they do no harm."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dstrain.distributed.sharding import Sharding
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column
from dstrain.lora.layers import LoraConfig, Trainables
from dstrain.registry.family import Option
from dstrain.runs.resolve import (
    check_saved_names,
    log_warnings,
    of_stage,
    resolve,
    with_defaults,
)

from tests.support import family as tiny
from tests.support.command_lines import toy_config
from tests.support.runs import config, project

FULL, OTHER = (
    Trainables(("dit2",)),
    Trainables(lora=(LoraConfig("dit2", ("to_q",), 2, 2.0),)),
)
SAVES = Option("as_others", "Save in the names of another program.", saves="kohya")


def setup_of(trained: Trainables) -> Any:
    return SimpleNamespace(
        family=SimpleNamespace(default_trainable="dit", load=lambda part: ()),
        trainables=trained,
        saving=SAVES,
        config=SimpleNamespace(lora_format=None),
    )


@pytest.mark.parametrize("trained", [FULL, OTHER])
def test_names_of_another_program_are_refused_without_a_lora_of_the_default_component(
    trained: Trainables,
) -> None:
    with pytest.raises(
        UsageError, match="--as_others: has no effect: no LoRA on dit is trained"
    ):
        check_saved_names(setup_of(trained))
    check_saved_names(
        setup_of(Trainables(lora=(LoraConfig("dit", ("to_q",), 2, 2.0),)))
    )


def setup_with_videos(stage: str, **changes: Any) -> Any:
    config = {
        "on_bad_sample": "skip",
        "url_cache": "urls",
        "num_frames": 9,
        **changes,
    }
    found = SimpleNamespace(
        stage=stage,
        datasets=(),
        parts=(),
        spec=SimpleNamespace(inputs={}),
        config=SimpleNamespace(**config),
        task=SimpleNamespace(name="sft"),
        extensions=SimpleNamespace(broken=("plugin bad 1.0: no",)),
        dataset=SimpleNamespace(
            columns={"video": Column("video", "video")},
            groups=np.array([0, 1]),
            signatures=[
                frozenset({("video", ((frames, 16, 16),))}) for frames in (5, 9)
            ],
            unused_columns=("mood",),
            table=SimpleNamespace(path="metadata.csv"),
        ),
    )
    found.checked_dataset = found.dataset
    found.parts = (SimpleNamespace(setup=found),)
    return found


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("train", []),
        (
            "",
            [
                "1 of 2 clips",
                "a column is not used by this variant: 'mood'",
            ],
        ),
        (
            "data_process",
            [
                "1 of 2 clips have fewer than --num_frames 9 frames; the shortest has 5",
                "a column is not used by this variant: 'mood'",
            ],
        ),
    ],
)
def test_a_warning_says_and_neither_waits_nor_takes_a_lock(
    stage: str, more: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    log_warnings(setup_with_videos(stage))
    said = caplog.messages
    assert len(said) == 1 + len(more)
    assert all(
        words in line
        for words, line in zip(["plugin bad 1.0: no", *more], said, strict=True)
    )


def test_a_column_of_an_optional_input_is_not_used_until_it_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = setup_with_videos("", extra_inputs="style")
    found.spec.inputs["feeling"] = Column("mood", "text", optional=True)
    log_warnings(found)
    *_, said = caplog.messages
    assert "a column is not used: 'mood'; optional inputs" in said
    assert said.endswith("--extra_inputs style,feeling")


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


def test_a_resolution_without_buckets_is_refused_before_rows_are_read(
    tiny: object, tmp_path: Path
) -> None:
    project(tmp_path)
    (tmp_path / "data/metadata.json").write_text('[{"image": "gone.png"}]')
    with pytest.raises(UsageError, match=r"--resolution: 2 is too small: at least \d"):
        resolve(config(tmp_path, resolution="2"))


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
