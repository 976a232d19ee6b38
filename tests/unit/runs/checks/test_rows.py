"""What the rows of a run have, and what of its datasets is short or not read, is said."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dstrain.plugin import Column
from dstrain.runs.checks.rows import log_warnings


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
