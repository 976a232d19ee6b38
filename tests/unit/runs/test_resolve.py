"""Flags that do not fit are refused whatever the command line is for: a plan, stage 1,
training.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from dstrain.config.options import TrainConfig
from dstrain.errors import UsageError
from dstrain.graph.spec import ExpertSchedule
from dstrain.lora.layers import LoraConfig, Trainables
from dstrain.registry.family import Option
from dstrain.runs.resolve import check_saved_names, log_warnings, resolve

FULL, OTHER = (
    Trainables(("dit2",)),
    Trainables(lora=(LoraConfig("dit2", ("to_q",), 2, 2.0),)),
)
SAVES = Option("as_others", "Save in the names of another program.", saves="kohya")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "flags", [{"dry_run": True}, {"task": "sft:data_process"}, {"task": "sft:train"}]
)
def test_a_prefix_that_no_saved_name_has_is_refused_by_a_plan_and_in_every_stage(
    flags: dict[str, Any],
) -> None:
    given = {
        "model": "tiny",
        "toy": True,
        "remove_prefix_in_ckpt": "pipe.nonsense.",
        **flags,
    }
    with pytest.raises(
        UsageError,
        match=r"no saved name begins with 'pipe\.nonsense\.'; expected pipe\.dit\.",
    ):
        resolve(TrainConfig(**given))


def setup_of(
    trained: Trainables, prefix: str | None = None, saving: Option | None = None
) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(remove_prefix_in_ckpt=prefix),
        family=SimpleNamespace(default_trainable="dit"),
        trainables=trained,
        trained_experts=[
            name for name in ("dit", "dit2") if name in trained.components
        ],
        spec=SimpleNamespace(
            experts=ExpertSchedule("dit", {"dit": (875, 1000), "dit2": (0, 875)})
        ),
        saving=saving,
    )


@pytest.mark.parametrize("prefix", ["pipe.dit.", "pipe.dit2.", None])
def test_the_prefix_of_an_experts_role_is_accepted_for_its_parts(
    prefix: str | None,
) -> None:
    check_saved_names(setup_of(FULL, prefix))


def test_the_prefix_of_what_is_not_trained_is_refused_naming_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"expected pipe\.dit2\. or pipe\.dit\."):
        check_saved_names(setup_of(FULL, "pipe.vae."))


@pytest.mark.parametrize("trained", [FULL, OTHER])
def test_names_of_another_program_are_refused_without_a_lora_of_the_default_component(
    trained: Trainables,
) -> None:
    with pytest.raises(
        UsageError, match="--as_others: has no effect: no LoRA on dit is trained"
    ):
        check_saved_names(setup_of(trained, saving=SAVES))
    check_saved_names(
        setup_of(Trainables(lora=(LoraConfig("dit", ("to_q",), 2, 2.0),)), saving=SAVES)
    )


def setup_with_videos(stage: str, **changes: Any) -> Any:
    config = {
        "on_bad_sample": "skip",
        "url_cache": "urls",
        "feature_cache": None,
        "num_frames": 9,
        **changes,
    }
    cells = [
        {"video": SimpleNamespace(kind="video", shapes=((frames, 16, 16),))}
        for frames in (5, 9)
    ]
    return SimpleNamespace(
        stage=stage,
        config=SimpleNamespace(**config),
        task=SimpleNamespace(name="sft"),
        extensions=SimpleNamespace(broken=("plugin bad 1.0: no",)),
        dataset=SimpleNamespace(
            rows=cells,
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
                "--feature_cache has no effect in a single run; it is used by --task sft:train",
                "1 of 2 clips",
                "column 'mood'",
            ],
        ),
        (
            "data_process",
            [
                "1 of 2 clips have fewer than --num_frames 9 frames; the shortest has 5",
                "column 'mood'",
            ],
        ),
    ],
)
def test_a_warning_says_and_neither_waits_nor_takes_a_lock(
    stage: str, more: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    log_warnings(setup_with_videos(stage, feature_cache="cache"))
    said = caplog.messages
    assert len(said) == 1 + len(more)
    assert all(
        words in line
        for words, line in zip(["plugin bad 1.0: no", *more], said, strict=True)
    )
