"""Flags that have no effect are refused, or logged where they do no harm."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column
from dstrain.lora.layers import LoraConfig, Trainables
from dstrain.registry.family import Option
from dstrain.runs.resolve import check_saved_names, log_warnings

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
    return SimpleNamespace(
        stage=stage,
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
