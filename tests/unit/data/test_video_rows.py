"""A row with videos becomes a sample for each clip, keyed before it is decoded."""

import multiprocessing
import pickle
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain.config.options import SamplingMode
from dstrain.data import Cell, Dataset, Resolution, input_key, load_cell
from dstrain.data.clips import FrameSampling
from dstrain.data.variants import AugmentationOptions
from dstrain.graph import Input
from dstrain.plugin import Column, Measured
from dstrain.storage import Digests
from PIL import Image

from tests.support.datasets import bad_cells, open_rows
from tests.support.videos import film, folder, frame, gif, seconds, steady

NEAR = 0.02
"""Seconds by which a place may be wrong: half a pixel."""
VIDEO = Column("video", "video", multiple=16, frame_multiple=4, fps=15.0)
SCENE: Mapping[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("video", "image", frame="first"),
    "input_video": VIDEO,
    "end_image": Column("video", "image", frame="last", mode="L"),
    "num_frames": Measured("input_video", "frames"),
    "width": Measured("input_video", "width"),
}
CONTROLLED: Mapping[str, Input] = {**SCENE, "control": replace(VIDEO, name="control")}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """long.mp4 (30 frames at 15 fps), fast.mp4 (120 at 60), short.mp4 (6), frames (10)."""
    base = tmp_path_factory.mktemp("scenes")
    film(base / "long.mp4", steady(30, 15), 15)
    film(base / "fast.mp4", steady(120, 60), 60)
    film(base / "short.mp4", steady(6, 15), 15)
    folder(base / "frames", steady(10, 15))
    gif(base / "moving.gif", [100, 200, 100])
    Image.fromarray(frame(0.5)).save(base / "still.png")
    Image.new("RGB", (64, 64)).save(base / "square.png")
    return base


def rows_of(*videos: str) -> list[dict[str, str]]:
    """A row for each video, with a caption of its own."""
    return [{"video": one, "prompt": str(row)} for row, one in enumerate(videos)]


def sampled(
    base: Path,
    *videos: str,
    mode: SamplingMode = "head",
    frames: int = 9,
    samples: int = 1,
    inputs: Mapping[str, Input] = SCENE,
    **settings: Any,
) -> Dataset:
    """The dataset of these videos, cut into clips."""
    sampling = FrameSampling(frames, mode, samples)
    return open_rows(base, rows_of(*videos), inputs, sampling=sampling, **settings)


def filmed(cell: Cell) -> list[float]:
    """When the frames of a clip were filmed."""
    return seconds(load_cell(cell).pixels.numpy())


def test_a_video_becomes_frames_images_of_them_and_sizes(scenes: Path) -> None:
    (row,) = sampled(scenes, "fast.mp4").rows
    facts = {name: row[name].literal for name in ("prompt", "num_frames", "width")}
    assert facts == {"prompt": "0", "num_frames": 9, "width": 128}
    loaded = load_cell(row["input_video"])
    assert (tuple(loaded.pixels.shape), loaded.fps) == ((9, 48, 128, 3), 15.0)
    assert filmed(row["input_video"]) == pytest.approx(steady(9, 15), abs=NEAR)
    first, last = (load_cell(row[name]) for name in ("input_image", "end_image"))
    assert np.array_equal(first, loaded.pixels[0])
    grey = Image.fromarray(loaded.pixels[8].numpy()).convert("L")
    assert np.array_equal(last, grey)


def test_each_chunk_is_a_sample_of_its_row_with_images_of_its_own(scenes: Path) -> None:
    data = sampled(scenes, "long.mp4", "short.mp4", "fast.mp4", mode="chunk")
    ids = [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1], [2, 2]]
    assert data.sample_ids.tolist() == ids
    prompts = [row["prompt"].literal for row in data.rows]
    assert prompts == [str(row) for row, _ in ids]
    for number, row in enumerate(data.rows[:3]):
        moments = [(9 * number + frame) / 15 for frame in range(9)]
        assert filmed(row["input_video"]) == pytest.approx(moments, abs=NEAR)
        first = load_cell(row["input_video"]).pixels[0]
        assert np.array_equal(load_cell(row["input_image"]), first)


@pytest.mark.parametrize("name", ["long.mp4", "frames", "moving.gif", "still.png"])
def test_a_video_is_mirrored_as_an_image_is(scenes: Path, name: str) -> None:
    flip = AugmentationOptions(flip=True)
    rows = sampled(scenes, name, augmentation=flip).rows
    plain, mirrored = (load_cell(row["input_video"]).pixels for row in rows)
    assert torch.equal(mirrored, plain.flip(2))
    assert not torch.equal(mirrored, plain)


def test_clips_that_show_the_same_are_one_sample(scenes: Path) -> None:
    """As of a video with fewer frames per second than are wanted."""
    inputs = {"input_video": replace(VIDEO, fps=60.0)}
    data = sampled(scenes, "short.mp4", mode="chunk", frames=1, inputs=inputs)
    shown = [filmed(row["input_video"]) for row in data.rows]
    assert np.ravel(shown) == pytest.approx(steady(6, 15), abs=NEAR)
    data = sampled(scenes, "frames", mode="chunk", frames=5)
    assert data.sample_ids.tolist() == [[0, 0], [0, 1]]
    # At another size they do not.
    small = (Resolution(16, 32, 1), Resolution(48, 128, 1))
    data = sampled(scenes, "still.png", further_resolutions=small)
    sizes = [row["input_video"].shapes[0][1:] for row in data.rows]
    assert sizes == [(48, 128), (16, 32)]


def test_a_video_too_short_for_the_learned_one_is_bad(scenes: Path) -> None:
    controls = ("fast.mp4", "frames", "short.mp4", "still.png")
    rows = [{"video": "long.mp4", "control": name} for name in controls]
    # Of ten frames, nine are read, and of six five.
    rows += [{"video": "short.mp4", "control": "long.mp4"}]
    nine = FrameSampling(9)
    found = bad_cells(scenes, rows, CONTROLLED, sampling=nine)
    assert list(found) == [f"metadata.json:{row}:control" for row in (3, 4)]
    assert " 6 " in found["metadata.json:3:control"]
    data = open_rows(scenes, rows[:2] + rows[4:], CONTROLLED, sampling=nine)
    assert [row["input_video"].shapes[0][0] for row in data.rows] == [9, 9, 5]
    # Where no video is measured, the longest says how many frames are read.
    inputs = {"mask": Column("mask", "video"), "one": VIDEO}
    rows = [{"video": "short.mp4", "mask": "long.mp4"}]
    found = bad_cells(scenes, rows, inputs, sampling=nine)
    assert list(found) == ["metadata.json:1:video"]
    # Of three frames, one makes a clip that both can have.
    rows = [{"video": "still.png", "mask": "moving.gif"}]
    assert len(open_rows(scenes, rows, inputs, sampling=nine).rows) == 1
    # What is a mask of another has its aspect ratio.
    inputs = {"one": VIDEO, "mask": Column("mask", "video", of="one")}
    rows += [{"video": "still.png", "mask": "square.png"}]
    found = bad_cells(scenes, rows, inputs, sampling=nine)
    assert list(found) == ["metadata.json:2:mask"]


def test_clips_with_too_few_frames_to_learn_from_are_bad_cells(scenes: Path) -> None:
    inputs = {"input_video": VIDEO, "first": replace(VIDEO, least_frames=2)}
    found = bad_cells(scenes, rows_of("still.png", "long.mp4"), inputs)
    assert list(found) == ["metadata.json:1:video"]


NO_MEMORY = Path("absent")


def key(data: Dataset, name: str = "input_video", sample: int = 0) -> str:
    return input_key(data.rows[sample][name], Digests(NO_MEMORY))


def test_a_video_has_one_key_and_another_for_other_frames(scenes: Path) -> None:
    data = sampled(scenes, "long.mp4", "long.mp4", "fast.mp4")
    assert key(data) == key(data, sample=1) != key(data, sample=2)
    fewer = sampled(scenes, "long.mp4", frames=5)
    spread = sampled(scenes, "long.mp4", mode="uniform", samples=2)
    small = sampled(scenes, "long.mp4", resolution=Resolution(16, 32, 1))
    faster = {"input_video": replace(VIDEO, fps=30.0)}
    resampled = sampled(scenes, "long.mp4", inputs=faster)
    keys = [key(one) for one in (data, fewer, small, resampled)]
    assert len({*keys, key(spread, sample=1)}) == 5
    assert key(data, "input_image") == key(fewer, "input_image")
    assert key(data, "end_image") != key(fewer, "end_image")


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_cells_are_sent_small_to_other_processes(scenes: Path, start: str) -> None:
    (row,) = sampled(scenes, "long.mp4", frames=29).rows
    clip, image = row["input_video"], row["input_image"]
    assert len(pickle.dumps(clip)) < 500 + len(clip.files[0])
    with ProcessPoolExecutor(1, multiprocessing.get_context(start)) as workers:
        there = workers.submit(load_cell, clip).result()
        first = workers.submit(load_cell, image).result()
    assert torch.equal(there.pixels, load_cell(clip).pixels)
    assert np.array_equal(first, load_cell(image))
