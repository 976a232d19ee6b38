"""A project with the examples of all tools and the datasets that they name, and what
`dstrain import` makes of a file.
"""

import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest
from dstrain.cli.main import main
from PIL import Image

from tests.support.once import once

EXAMPLES = Path(__file__).with_name("examples")
FOLDERS = ("photos", "more", "before", "train/10_dog", "reg/1_animal")
SIDE = 640
"""Pixels of images, enough for the least bucket of each example."""
HEADING = re.compile(r"(.+) \(\d+\):$")
KEY = re.compile(r" {4}(\S.*?)(?:  .*)?$")
LOST = re.compile(r"# (?:[\w. -]+\.\w+: )?(.+?): (.*)$")


@dataclass(frozen=True)
class Imported:
    options: dict[str, Any]
    """What was written, with tables of datasets below "dataset"."""
    toml: str
    said: str
    kinds: list[tuple[str, str]]
    """The heading of the report that each key stands below, and the key."""
    reasons: dict[str, str]
    """Key -> why it is not carried over, or only in part."""

    def kind(self, key: str) -> str:
        """Return the heading of the only key whose name ends so."""
        (found,) = {kind for kind, one in self.kinds if one.endswith(key)}
        return found

    def reason(self, key: str) -> str:
        """Return why the only key whose name ends so is not carried over."""
        (found,) = {why for one, why in self.reasons.items() if one.endswith(key)}
        return found


def parsed(toml: str, said: str) -> Imported:
    """Return what was written, and read the report."""
    heading, kinds, reasons = "", [], {}
    for line in said.splitlines():
        if found := HEADING.match(line):
            heading = found[1]
        elif found := KEY.match(line):
            kinds.append((heading, found[1].strip()))
    _, *lost = re.split(
        r"^# (?:Carried|Not carried) over.*:$", toml, flags=re.MULTILINE
    )
    for line in "".join(lost).splitlines():
        if found := LOST.match(line):
            reasons[found[1]] = found[2]
    return Imported(tomllib.loads(toml), toml, said, kinds, reasons)


@pytest.fixture
def imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Imported]:
    """Import a file in the working directory to run.toml."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(source: str, *words: str) -> Imported:
        command = ["import", source, *words, "--output", "run.toml", "--overwrite"]
        assert main(command) == 0
        return parsed(Path("run.toml").read_text(), capsys.readouterr().out)

    return run


def write_project(place: Path) -> None:
    """Write the folder that each project is a copy of."""
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


@pytest.fixture
def project(empty: Path) -> Path:
    """The working directory: the examples and their datasets."""
    written = once("tools-project", write_project)
    shutil.copytree(written, empty, dirs_exist_ok=True)
    return empty
