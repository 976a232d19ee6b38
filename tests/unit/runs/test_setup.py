"""A command line resolved: what is said of it before a run."""

from types import SimpleNamespace
from typing import Any

import pytest
from dstrain.runs.resolve import log_warnings


def setup_of(stage: str, **changes: Any) -> Any:
    config = {
        "on_bad_sample": "skip",
        "url_cache": "urls",
        "feature_cache": None,
        "num_frames": 9,
        **changes,
    }
    cells = [
        {"video": SimpleNamespace(kind="video", frames=frames)} for frames in (5, 9)
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
    log_warnings(setup_of(stage, feature_cache="cache"))
    said = caplog.messages
    assert len(said) == 1 + len(more)
    assert all(
        words in line
        for words, line in zip(["plugin bad 1.0: no", *more], said, strict=True)
    )
