"""A project with the examples of all tools and the datasets that they name."""

import shutil
from pathlib import Path

import imageio
import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).with_name("examples")
FOLDERS = ("photos", "more", "before", "train/10_dog", "reg/1_animal")
SIDE = 640
"""Pixels of images, enough for the least bucket of each example."""


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that each project is a copy of."""
    place = tmp_path_factory.mktemp("project")
    for name in FOLDERS:
        folder = place / name
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (SIDE, SIDE)).save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text("a dog, sitting")
    videos = place / "videos"
    videos.mkdir()
    frames = [np.full((480, 832, 3), level, np.uint8) for level in range(30)]
    imageio.mimwrite(videos / "a.mp4", frames, fps=16, codec="libx264")
    (videos / "a.txt").write_text("a dog")
    shutil.copytree(EXAMPLES, place, dirs_exist_ok=True)
    return place


@pytest.fixture
def project(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: the examples and their datasets."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
