"""Several numbers of frames: each video gives clips of the most that it has, of the same
bits split and unsplit.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import Frames, TrainConfig, UsageError, run
from dstrain.data.output import write_video
from dstrain.runs import Setup
from dstrain.runs.dry_run.summary import plan_run
from dstrain.runs.resolve import resolve

from tests.support.runs import log

FRAMES = {"tiny": 3, "short": 7, "middle": 12, "fast": 24, "long": 30}
"""Frames of each video: of the fast one at twice the model's rate, so 12 count."""
CLIPS = {"tiny": 1, "short": 5, "middle": 9, "fast": 9, "long": 13}
"""With --num_frames 5,9,13."""


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    rows = []
    numbers = np.random.default_rng(0)
    for name, count in FRAMES.items():
        pixels = torch.from_numpy(
            numbers.integers(0, 256, (count, 32, 48, 3), np.uint8)
        )
        rate = 32.0 if name == "fast" else 16.0
        write_video(Frames(pixels, rate), folder / f"{name}.mp4")
        rows.append({"video": f"{name}.mp4", "prompt": name})
    (folder / "metadata.json").write_text(json.dumps(rows))
    return folder


def config(videos: Path, **changes: Any) -> TrainConfig:
    flags: dict[str, Any] = {
        "model": "wan",
        "variant": "t2v",
        "toy": True,
        "dataset_base_path": videos,
        "num_frames": "5,9,13",
        "lora_rank": 2,
    }
    return TrainConfig(**{**flags, **changes})


def shapes(setup: Setup) -> list[tuple[str, tuple[int, int, int]]]:
    """The prompt of each sample, and frames, height and width of its clip."""
    return [
        (cells["prompt"].literal, cells["input_video"].shapes[0])
        for cells in setup.dataset.rows
    ]


def test_a_video_has_the_most_frames_that_it_is_long_enough_for(videos: Path) -> None:
    found = shapes(resolve(config(videos)))
    assert {name: shape[0] for name, shape in found} == CLIPS
    one = shapes(resolve(config(videos, num_frames=9)))
    assert [shape[0] for _, shape in one] == [1, 5, 9, 9, 9]
    cells = [
        resolve(config(videos, num_frames=given)).dataset.rows[2]["input_video"]
        for given in (9, "5,9,13")
    ]
    # The same clip, and so the same key of its values.
    assert cells[0] == cells[1]


def test_each_resolution_has_each_number_of_frames(videos: Path) -> None:
    found = shapes(resolve(config(videos, resolution="16,32", bucket_upscale=True)))
    assert len(found) == 2 * len(FRAMES)
    for name, count in CLIPS.items():
        own = [shape for prompt, shape in found if prompt == name]
        assert [shape[0] for shape in own] == [count, count]
        assert own[0][1:] != own[1][1:]


def test_chunks_of_a_video_have_one_length(videos: Path) -> None:
    counts = Counter(shapes(resolve(config(videos, frame_sampling="chunk"))))
    assert {(name, shape[0]): count for (name, shape), count in counts.items()} == {
        **dict.fromkeys(CLIPS.items(), 1),
        ("long", 13): 2,
    }


@pytest.mark.parametrize("more", [{}, {"resolution": "16,32", "bucket_upscale": True}])
def test_unsplit_and_split_runs_are_equal(
    videos: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    flags: dict[str, Any] = {"num_epochs": 1, "batch_size": 2, **more}
    run(config(videos, output_path=tmp_path / "unsplit", **flags))
    for stage in ("data_process", "train"):
        task = {"task": f"sft:{stage}", "feature_cache": tmp_path / "cache"}
        run(config(videos, output_path=tmp_path / "split", **task, **flags))
    assert log(tmp_path / "unsplit") == log(tmp_path / "split")


def test_the_buckets_are_said_at_the_start_and_by_a_dry_run(
    videos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    planned = config(videos, max_steps=1, output_path=tmp_path / "out", dry_run=True)
    summary = plan_run(resolve(planned)).page()
    run(replace(planned, dry_run=False))
    said = capfd.readouterr().err
    for text in (said, summary):
        assert "9 frames of 32 x 48: 2 samples, 2 batches" in text
        assert "13 frames of 32 x 48: 1 sample, 1 batch" in text
        assert "32 x 48: 1 sample" in text
    short = "1 of 5 clips have fewer frames than 5, the least of --num_frames"
    assert f"{short}; the shortest has 1" in said


def test_each_dataset_has_its_own_numbers(videos: Path) -> None:
    own = {"dataset_base_path": str(videos), "num_frames": "5,9"}
    found = shapes(resolve(config(videos, dataset=(json.dumps(own),))))
    assert [shape[0] for _, shape in found] == [*CLIPS.values(), 1, 5, 9, 9, 9]


@pytest.mark.parametrize(
    ("given", "named"), [("5,10", "10|4n+1|9"), ("5,,9", "81"), ("5,5", "5")]
)
def test_numbers_that_the_model_cannot_use_are_refused(
    videos: Path, tmp_path: Path, given: str, named: str
) -> None:
    with pytest.raises(UsageError) as caught:
        run(config(videos, num_frames=given, output_path=tmp_path / "out"))
    assert all(one in caught.value.what for one in named.split("|"))
    assert caught.value.where == "--num_frames"
