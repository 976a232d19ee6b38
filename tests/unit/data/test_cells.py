"""Cells of videos: a row becomes one sample per clip, and what is loaded is known, and
keyed, before it is decoded.
"""

import json
import multiprocessing
import pickle
import shutil
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import UsageError
from dstrain.config.options import SamplingMode
from dstrain.data import (
    DataConfig,
    Dataset,
    FrameSampling,
    Resolution,
    input_key,
    load_cell,
    open_dataset,
    read_literal,
)
from dstrain.graph import Input
from dstrain.plugin import Column, Measured, one_of
from dstrain.storage import Digests
from PIL import Image

from tests.support.videos import film, folder, frame, gif, seconds, steady

DYNAMIC = Resolution(None, None, 1024 * 1024)
SCENE: Mapping[str, Input] = {
    "prompt": Column("prompt"),
    "input_video": Column("video", "video", multiple=16, frame_multiple=4, fps=15.0),
    "input_image": Column("video", "image", frame="first"),
    "end_image": Column("video", "image", frame="last", mode="L"),
    "num_frames": Measured("input_video", "frames"),
    "width": Measured("input_video", "width"),
}


def test_a_text_may_be_one_of_a_few() -> None:
    column = Column("way", check=one_of("left", "right"))
    assert read_literal("left", column) is not None
    with pytest.raises(ValueError, match="expected one of left, right, got 'up'"):
        read_literal("up", column)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 30 frames at 15 fps (long.mp4), 120 at 60 fps (fast.mp4), 6
    (short.mp4), 10 images (frames).
    """
    base = tmp_path_factory.mktemp("scenes")
    film(base / "long.mp4", steady(30, 15), 15)
    film(base / "fast.mp4", steady(120, 60), 60)
    film(base / "short.mp4", steady(6, 15), 15)
    folder(base / "frames", steady(10, 15))
    gif(base / "moving.gif", [100, 200, 100])
    Image.fromarray(frame(0.5)).save(base / "still.png")
    return base


def sampled(
    base: Path,
    *videos: str,
    mode: SamplingMode = "head",
    frames: int = 9,
    samples: int = 1,
    **settings: Any,
) -> Dataset:
    """The dataset of these videos, each with a caption of its own."""
    rows = [
        {"video": name, "prompt": str(number)} for number, name in enumerate(videos)
    ]
    return opened(base, rows, FrameSampling(frames, mode, samples), **settings)


def opened(
    base: Path,
    rows: list[dict[str, str]],
    sampling: FrameSampling,
    inputs: Mapping[str, Input] = SCENE,
    resolution: Resolution = DYNAMIC,
) -> Dataset:
    (base / "metadata.json").write_text(json.dumps(rows))
    return open_dataset(DataConfig(base, None, None, resolution, (), sampling), inputs)


def test_a_video_becomes_frames_an_image_of_their_first_and_last_and_their_size(
    scenes: Path,
) -> None:
    (row,) = sampled(scenes, "long.mp4").rows
    assert {name: cell.literal for name, cell in row.items() if not cell.files} == {
        "prompt": "0", "num_frames": 9, "width": 128,
    }  # fmt: skip
    loaded = load_cell(row["input_video"])
    assert (tuple(loaded.pixels.shape), loaded.fps) == ((9, 48, 128, 3), 15.0)
    assert seconds(loaded.pixels.numpy()) == pytest.approx(steady(9, 15), abs=0.02)
    first, last = load_cell(row["input_image"]), load_cell(row["end_image"])
    assert np.array_equal(np.asarray(first), loaded.pixels[0].numpy())
    assert np.array_equal(
        np.asarray(last),
        np.asarray(Image.fromarray(loaded.pixels[8].numpy()).convert("L")),
    )


def test_files_of_one_scene_at_two_rates_give_the_same_motion(scenes: Path) -> None:
    slow, fast = (
        load_cell(row["input_video"])
        for row in sampled(scenes, "long.mp4", "fast.mp4").rows
    )
    assert seconds(fast.pixels.numpy()) == pytest.approx(
        seconds(slow.pixels.numpy()), abs=0.02
    )
    (row,) = sampled(
        scenes, "fast.mp4", inputs={"input_video": Column("video", "video")}
    ).rows
    own = load_cell(row["input_video"])
    assert seconds(own.pixels.numpy()) == pytest.approx(steady(9, 60), abs=0.02)
    assert own.fps == pytest.approx(60, rel=0.01)


def test_each_chunk_is_a_sample_of_its_row_with_images_of_its_own(
    scenes: Path,
) -> None:
    data = sampled(scenes, "long.mp4", "short.mp4", "fast.mp4", mode="chunk")
    assert [*map(tuple, data.sample_ids.tolist())] == [
        *((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2))
    ]
    assert [row["prompt"].literal for row in data.rows] == [
        "0",
        "0",
        "0",
        "1",
        "2",
        "2",
        "2",
    ]
    for number, row in enumerate(data.rows[:3]):
        filmed = seconds(load_cell(row["input_video"]).pixels.numpy())
        assert filmed == pytest.approx(
            [(9 * number + frame) / 15 for frame in range(9)], abs=0.02
        )
        assert np.array_equal(
            np.asarray(load_cell(row["input_image"])),
            load_cell(row["input_video"]).pixels[0].numpy(),
        )


def test_uniform_samples_reach_from_the_first_frame_to_the_last(scenes: Path) -> None:
    rows = sampled(scenes, "long.mp4", mode="uniform", samples=3).rows
    starts = [dict(row["input_video"].parameters)["frames"][0] for row in rows]
    assert starts == [0, 10, 21]


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("short.mp4", 5),
        ("still.png", 1),
        ("frames", 9),
        ("moving.gif", 5),
        ("long.mp4", 29),
    ],
)
def test_a_shorter_video_gives_the_most_frames_the_model_can_use(
    name: str, frames: int, scenes: Path
) -> None:
    data = sampled(scenes, name, frames=81)
    (row,) = data.rows
    assert (
        load_cell(row["input_video"]).pixels.shape[0]
        == row["num_frames"].literal
        == frames
    )
    assert dict(data.signature(0))["input_video"] == ((frames, 48, 128),)


def test_videos_of_one_row_are_cut_at_the_same_places_as_far_as_the_shortest_goes(
    scenes: Path,
) -> None:
    inputs = {
        **SCENE,
        "control": Column("control", "video", multiple=16, frame_multiple=4, fps=15.0),
    }
    rows = [
        {"video": "long.mp4", "control": "frames"},
        {"video": "long.mp4", "control": ""},
    ]
    data = opened(scenes, rows, FrameSampling(5, "chunk"), inputs)
    assert [*map(tuple, data.sample_ids.tolist())] == [
        *((0, 0), (0, 1), *((1, chunk) for chunk in range(6)))
    ]
    assert [Path(file).name for file in data.rows[1]["control"].files] == [
        f"{number}.png" for number in range(5, 10)
    ]
    assert "control" not in data.rows[2]


def test_a_video_too_short_for_the_clips_of_the_learned_one_is_a_bad_cell(
    scenes: Path,
) -> None:
    inputs = {
        **SCENE,
        "control": Column("control", "video", multiple=16, frame_multiple=4, fps=15.0),
    }
    rows = [
        {"video": "long.mp4", "control": name}
        for name in ("fast.mp4", "frames", "short.mp4", "still.png")
    ]
    # Of ten frames, nine are read, and of six five.
    rows += [{"video": "short.mp4", "control": "long.mp4"}]
    with pytest.raises(UsageError) as refused:
        opened(scenes, rows, FrameSampling(9), inputs)
    assert [line.strip() for line in refused.value.help_lines] == [
        "metadata.json:3:control: has 6 frames, too few for the 9 that are read of video",
        "metadata.json:4:control: has 1 frame, too few for the 9 that are read of video",
    ]
    data = opened(scenes, rows[:2] + rows[4:], FrameSampling(9), inputs)
    frames = [row["input_video"].shapes[0][0] for row in data.rows]
    assert frames == [9, 9, 5]


def test_where_no_video_is_measured_the_longest_says_how_many_frames_are_read(
    scenes: Path,
) -> None:
    inputs = {"one": SCENE["input_video"], "mask": Column("mask", "video")}
    rows = [{"video": "short.mp4", "mask": "long.mp4"}]
    with pytest.raises(UsageError, match="video: has 6 frames, too few for the 9"):
        opened(scenes, rows, FrameSampling(9), inputs)


def test_a_number_of_frames_that_no_video_input_can_have_is_refused(
    scenes: Path,
) -> None:
    with pytest.raises(
        UsageError, match=r"--num_frames: 10 is not 4n\+1; the nearest is 9"
    ):
        sampled(scenes, "long.mp4", frames=10)
    assert sampled(
        scenes, "long.mp4", frames=10, inputs={"prompt": Column("prompt")}
    ).sample_ids.tolist() == [[0, 0]]


def test_samples_share_a_batch_only_with_as_many_frames(scenes: Path) -> None:
    data = sampled(scenes, "long.mp4", "fast.mp4", "short.mp4", "still.png")
    one, two, shorter, still = (data.signature(sample) for sample in range(4))
    assert one == two
    assert len({one, shorter, still}) == 3


def test_a_video_has_one_key_wherever_it_stands_and_another_for_anything_that_changes_its_frames(
    scenes: Path,
) -> None:
    digests = Digests(Path("absent"))

    def key(data: Dataset, name: str = "input_video", sample: int = 0) -> str:
        return input_key(data.rows[sample][name], digests)

    data = sampled(scenes, "long.mp4", "long.mp4", "fast.mp4")
    assert key(data) == key(data, sample=1) != key(data, sample=2)
    whole = SCENE["input_video"]
    assert isinstance(whole, Column)
    others = [
        sampled(scenes, "long.mp4", frames=5),
        sampled(scenes, "long.mp4", mode="uniform", samples=2),
        sampled(scenes, "long.mp4", resolution=Resolution(16, 32, 1)),
        sampled(scenes, "long.mp4", inputs={"input_video": replace(whole, fps=30.0)}),
    ]
    keys = [
        key(data),
        key(others[0]),
        key(others[1], sample=1),
        key(others[2]),
        key(others[3]),
    ]
    assert len(set(keys)) == 5
    assert key(data, "input_image") == key(others[0], "input_image")
    assert key(data, "end_image") != key(others[0], "end_image")


def test_a_folder_of_frames_has_the_key_of_the_frames_it_gives(
    scenes: Path, tmp_path: Path
) -> None:
    def key(base: Path) -> str:
        return input_key(
            sampled(base, "frames").rows[0]["input_video"], Digests(Path("absent"))
        )

    copied = shutil.copytree(scenes, tmp_path / "copy")
    Image.fromarray(frame(0)).save(copied / "frames/9.png")  # beyond the first nine
    assert key(copied) == key(scenes)
    Image.fromarray(frame(0)).save(copied / "frames/8.png")
    assert key(copied) != key(scenes)


def test_bad_videos_are_reported_with_file_row_and_column(
    scenes: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(scenes, tmp_path / "bad")
    content = film(
        base / "half.mp4", steady(60, 30), 30, container={"movflags": "faststart"}
    ).read_bytes()
    (base / "half.mp4").write_bytes(content[: len(content) // 2])
    (base / "frames/3.png").unlink()
    (base / "frames/3.png").symlink_to(scenes / "still.png")
    mixed = folder(base / "mixed", steady(2, 15))
    (mixed / "1.png").write_text("no image")
    names = ["half.mp4", "none.mp4", "../out.mp4", "frames", "mixed", "metadata.json"]
    with pytest.raises(UsageError) as caught:
        sampled(base, "long.mp4", *names)
    lines = caught.value.help_lines
    assert [line.split(": ")[0] for line in lines] == [
        f"metadata.json:{number}:video" for number in range(2, 8)
    ]
    said = (
        "truncated",
        "no such file",
        "points outside the dataset's folder",
        "3.png points outside",
        "1.png is not an image",
        "is not a video in a supported",
    )
    assert all(words in line for words, line in zip(said, lines, strict=True))


def test_clips_load_in_spawned_processes_and_are_small_to_send(scenes: Path) -> None:
    cell = sampled(scenes, "long.mp4", frames=29).rows[0]["input_video"]
    assert len(pickle.dumps(cell)) < 500 + len(cell.files[0])
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as workers:
        there = workers.submit(load_cell, cell).result(timeout=60)
    assert torch.equal(there.pixels, load_cell(cell).pixels)
