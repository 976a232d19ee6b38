"""R14: a fault of the machine is never a fault of the data. While a file of a dataset is
looked up, inspected or decoded, the machine fails: the run ends with exit code 4 or 6,
leaves out no row, and completes once the machine works.
"""

import builtins
import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from dstrain.cli.main import main
from dstrain.data import packets
from dstrain.plugin import Column
from PIL import Image

from tests.support import family
from tests.support.family import write, write_data
from tests.support.fixtures import write_distribution
from tests.support.videos import film, steady

pytestmark = [
    pytest.mark.promise("R14", "a fault of the machine is never a fault of the data"),
    pytest.mark.usefixtures("installed"),
]

FAULTS = {
    "too many open files": errno.EMFILE,
    "too many open files of all": errno.ENFILE,
    "no memory for the system": errno.ENOMEM,
    "a failing disk": errno.EIO,
    "a stale handle": errno.ESTALE,
    "no permission": errno.EACCES,
    "no such device": errno.ENODEV,
    "no such address": errno.ENXIO,
    "a server that is silent": errno.ETIMEDOUT,
    "a server that is down": errno.EHOSTDOWN,
    "a connection that is gone": errno.ENOTCONN,
    "a failing disk of a server": errno.EREMOTEIO,
    "no memory": 0,
}
"""Name -> the number of the system's error; 0 for Python's own."""
MEDIA = ("PNG", "JPEG", "GIF", "mp4", "frames")
"""What the second of three rows names; the others name a PNG."""
MOMENTS = (0.0, 0.5, 0.99)
"""The part of the file's uses in a whole run at which the machine begins to fail: it is
looked up and inspected first, and decoded last.
"""
STAGES = ("unsplit", "stage 1")
VIDEOS = frozenset({"GIF", "mp4", "frames"})
BASE = replace(
    family.BASE,
    inputs={
        **family.BASE.inputs,
        "input_image": Column(
            "clip", "image", "first", multiple=8, frame_multiple=4, fps=15.0
        ),
    },
)
PIPELINES = {"base": BASE}
MODEL = replace(
    family.MODEL,
    name="filmed",
    pipelines=f"{__name__}:PIPELINES",
    variants=("base",),
    model_ids={},
)


@dataclass(frozen=True)
class Case:
    """A fault while one file is read."""

    fault: str
    medium: str
    moment: float
    stage: str
    skips: bool

    def __str__(self) -> str:
        flag = "skip" if self.skips else "error"
        return f"{self.fault}, {self.medium} at {self.moment}, {self.stage}, {flag}"


def cases() -> Iterator[Case]:
    """Every fault with every medium, flag and stage; the moments take turns."""
    number = 0
    for fault in FAULTS:
        for medium in MEDIA:
            for stage in STAGES:
                for skips in (False, True):
                    yield Case(fault, medium, MOMENTS[number % 3], stage, skips)
                    number += 1
            number += 1


CASES = tuple(cases())


@pytest.fixture(scope="module")
def installed(tiny: Path) -> None:
    write_distribution(tiny, "plugin-filmed", {"filmed": f"{__name__}:MODEL"})


def write_medium(folder: Path, medium: str) -> Path:
    """Write the file of the second row; returns the file that the machine fails at."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels) for pixels in noise]
    if medium == "mp4":
        return film(folder / "b.mp4", steady(12, 15), 15)
    if medium == "frames":
        (folder / "b").mkdir()
        for number, image in enumerate(images):
            image.save(folder / f"b/{number}.png")
        return folder / "b/0.png"
    path = folder / f"b.{medium.lower()}"
    if medium == "GIF":
        images[0].save(path, save_all=True, append_images=images[1:], duration=66)
    else:
        images[0].save(path)
    return path


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Medium -> a folder with a model and a dataset of three rows, whose second names the
    medium; the file is the link `target`.
    """

    @cache
    def made(medium: str) -> Path:
        folder = tmp_path_factory.mktemp(medium)
        write(folder / "model")
        write_data(folder / "data", ("a", "b", "c"))
        path = write_medium(folder / "data", medium)
        (folder / "target").symlink_to(path)
        column = "clip" if medium in VIDEOS else "image"
        name = "b" if medium == "frames" else path.name
        rows = [{column: file, "prompt": "a"} for file in ("0.png", name, "1.png")]
        (folder / "data/metadata.json").write_text(json.dumps(rows))
        return folder

    return made


def command(folder: Path, case: Case, out: Path) -> list[str]:
    files = family.weights_of(folder / "model").values()
    words = ["--model", "filmed" if case.medium in VIDEOS else "tiny"]
    words += ["--model_paths", json.dumps(list(files))]
    words += ["--dataset_base_path", str(folder / "data")]
    words += ["--on_bad_sample", "skip" if case.skips else "error"]
    if case.stage == "stage 1":
        return [*words, "--task", "sft:data_process", "--feature_cache", str(out)]
    return [*words, "--lora_rank", "2", "--output_path", str(out)]


class Machine:
    """Counts the uses of a file, and fails from one of them on."""

    def __init__(self, path: Path, number: int, allowed: float) -> None:
        self.path = os.path.realpath(path)
        self.number = number
        self.allowed = allowed
        self.uses = 0

    def use(self, path: Any) -> bool:
        """Whether a use of a path fails now."""
        try:
            here = os.path.abspath(os.fsdecode(path)) == self.path
        except TypeError:  # a number of an open file
            return False
        self.uses += here
        return here and self.uses > self.allowed

    def error(self) -> BaseException:
        if not self.number:
            return MemoryError()
        return OSError(self.number, "injected", self.path)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of what Python and FFmpeg look files up and open them with."""
        uses = [(builtins, "open"), (io, "open")]
        if self.number:  # looking a file up takes no memory worth the name
            uses += [(os, "stat"), (os, "lstat")]
        for module, name in uses:
            patch.setattr(module, name, self.watched(getattr(module, name)))
        patch.setattr(av, "open", self.watched_by_ffmpeg(av.open))
        packets._packets.cache_clear()

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            if self.use(path):
                raise self.error()
            return function(path, *arguments, **named)

        return call

    def watched_by_ffmpeg(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: str, *arguments: Any, **named: Any) -> Any:
            if self.use(path):
                av.error.err_check(-(self.number or errno.ENOMEM), path)
            return function(path, *arguments, **named)

        return call


@pytest.fixture(scope="module")
def uses(
    project: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], int]:
    """How often the file of a case is used in a run in which nothing fails."""
    counts: dict[tuple[str, str, bool, bool], int] = {}

    def count(case: Case) -> int:
        number = FAULTS[case.fault]
        key = case.medium, case.stage, case.skips, bool(number)
        if key not in counts:
            folder = project(case.medium)
            machine = Machine(folder / "target", number, float("inf"))
            with pytest.MonkeyPatch.context() as patch:
                machine.install(patch)
                out = tmp_path_factory.mktemp("whole") / "out"
                assert main(command(folder, case, out)) == 0
            counts[key] = machine.uses
        return counts[key]

    return count


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_of_the_machine_ends_the_run_and_leaves_out_no_row(
    case: Case,
    project: Callable[[str], Path],
    uses: Callable[[Case], int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, out = project(case.medium), tmp_path / "out"
    line = command(folder, case, out)
    total = uses(case)
    capfd.readouterr()
    machine = Machine(folder / "target", FAULTS[case.fault], int(case.moment * total))
    with pytest.MonkeyPatch.context() as patch:
        machine.install(patch)
        code = main(line)
    said = capfd.readouterr().err
    assert code in (4, 6), said
    assert machine.uses > machine.allowed
    assert not machine.number or machine.path in said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("bad_samples.jsonl"))
    begun = ["--overwrite"] if case.stage == "unsplit" else []
    assert main([*line, *begun]) == 0, capfd.readouterr().err
    assert not list(tmp_path.rglob("bad_samples.jsonl"))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_row_is_left_out_and_a_fault_at_another_row_still_ends_the_run(
    stage: str,
    skips: bool,
    project: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = Case("a failing disk", "PNG", 0.0, stage, skips)
    folder = project("PNG")
    whole = (folder / "data/0.png").read_bytes()
    try:
        (folder / "data/0.png").write_bytes(whole[:60])
        line = command(folder, case, tmp_path / "out")
        with pytest.MonkeyPatch.context() as patch:
            Machine(folder / "target", errno.EIO, 0).install(patch)
            assert main(line) == 4, capfd.readouterr().err
        assert main(line) == (0 if skips else 2), capfd.readouterr().err
    finally:
        (folder / "data/0.png").write_bytes(whole)
    lists = list(tmp_path.rglob("bad_samples.jsonl"))
    assert len(lists) == skips
    assert all(json.loads(one.read_text())["row"] == 1 for one in lists)
