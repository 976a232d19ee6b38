"""A disk that is full, or cannot be written: exit 4 naming the file, what was there
before is whole, and the run resumes.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from dstrain.cli.main import main
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.saved_states import damage
from dstrain.storage.temporaries import final

from tests.support.crashes import events, everything
from tests.support.family import weights_of
from tests.support.forks import fork
from tests.support.runs import project, train, tree

pytestmark = [
    pytest.mark.promise(
        "R4", "a full or read-only disk: exit 4, the file named, nothing lost"
    ),
    pytest.mark.usefixtures("tiny"),
]

PARTS = (0.0, 0.4, 0.8)
"""The part of a file that still fits."""
FILES = {
    "train": (
        "trainable.safetensors", "optimizer.safetensors", "state.json", "record.json",
        "step-2.dit.safetensors", "step-2.text_encoder.safetensors", "run.json", "config.json", "loss.csv",
    ),
    "stage 1": ("store.json", "digests.npy", "*.safetensors", "*.arrow"),
    "generate": ("a.png",),
    "data set": ("*.png", "metadata.csv", "generated.json"),
}  # fmt: skip
"""What a command writes, by its final name."""
GROWING = "loss.csv"
"""Its rows are added to what is open, which this way to limit files cannot hit: only
its beginning is tried.
"""
CASES = tuple(
    (command, name, part)
    for part in PARTS
    for command, names in FILES.items()
    for name in names
    if name != GROWING or part < 0.5
)
FLAGS: dict[str, Any] = {
    "trainable_models": "text_encoder", "lora_base_model": "dit", "lora_rank": 2, "save_steps": 1,
}  # fmt: skip
COMMANDS = {
    "train": ("--trainable_models", "text_encoder", "--lora_base_model", "dit", "--lora_rank", "2",
              "--save_steps", "1", "--max_steps", "3", "--learning_rate", "0.01", "--output_path", "{0}"),
    "stage 1": ("--task", "sft:data_process", "--feature_cache", "{0}"),
    "generate": ("generate", "--prompt", "a dog", "--num_inference_steps", "1", "--output", "{0}/a.png"),
    "data set": ("generate", "--dataset", "{1}/prompts.csv", "--num_inference_steps", "1", "--output", "{0}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = project(tmp_path_factory.mktemp("disk"))
    (folder / "prompts.csv").write_text("prompt,seed\na dog,1\na cat,2\n")
    return folder


@pytest.fixture(scope="module")
def begun(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run after its first step."""
    folder = tmp_path_factory.mktemp("begun")
    events(partial(train, here, output_path=folder, max_steps=1, **FLAGS), folder)
    return folder


@pytest.fixture(scope="module")
def whole(
    here: Path, begun: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function from a command to what it leaves with room enough."""

    @cache
    def of_command(command: str) -> Path:
        out = tmp_path_factory.mktemp("whole") / command
        if command == "train":
            shutil.copytree(begun, out)
        code, said = limited(words(here, command, out))
        assert code == 0, said
        return out

    return of_command


def words(here: Path, command: str, out: Path) -> list[str]:
    """A command line of the project that writes `out`; a run that is there resumes."""
    more = [word.format(out, here) for word in COMMANDS[command]]
    first = [more.pop(0)] if more[0] == "generate" else []
    data = [] if first else ["--dataset_base_path", str(here / "data")]
    paths = json.dumps(list(weights_of(here / "model").values()))
    tokenizer = ["--tokenizer_path", str(here / "model/tokenizer")]
    resume = ["--resume"] if states(out) else []
    return [
        *first,
        "--model",
        "tiny",
        "--model_paths",
        paths,
        *tokenizer,
        *data,
        *more,
        *resume,
    ]


def limited(line: list[str], pattern: str = "", size: int = 0) -> tuple[int, str]:
    """Run a command line in a child in which no more than `size` bytes of files of this
    name can be written.

    Returns its exit code and what it says.
    """
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        status = 1
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            sys.stdout, sys.stderr = (
                os.fdopen(1, "w", buffering=1),
                os.fdopen(2, "w", buffering=1),
            )
            if pattern:
                sys.addaudithook(partial(_limit, pattern, size))
            status = main(line)
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as lines:
        said = lines.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def _limit(pattern: str, size: int, event: str, arguments: tuple[Any, ...]) -> None:
    """As an audit hook: limit what is written from the opening of a file of this name
    to that of another.
    """
    if (
        event == "open"
        and isinstance(arguments[0], str | os.PathLike)
        and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    ):
        name = Path(arguments[0]).name
        name = final(Path(name)).name
        limit = size if Path(name).match(pattern) else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def check_failed(code: int, said: str, out: Path) -> str:
    """Exit 4, no traceback, a path below the output in its first line; nothing half is
    left. Returns that line.
    """
    assert code == 4, said
    assert "Traceback" not in said
    line = next(
        line for line in said.splitlines() if line.startswith("dstrain: error: ")
    )
    assert str(out) in line
    assert ".tmp-" not in line
    assert not [path for path in out.rglob(".tmp-*") if path.suffix != ".png"]
    return line


def check_resumes(
    here: Path, command: str, out: Path, whole: Callable[[str], Path]
) -> None:
    """With room, the same command ends as if nothing had been."""
    code, said = limited(words(here, command, out))
    assert code == 0, said
    assert tree(out).keys() == tree(whole(command)).keys()
    if command == "train":
        assert everything(out) == everything(whole(command))


@pytest.mark.parametrize(
    ("command", "name", "part"), CASES, ids=[f"{c}-{n}-{p}" for c, n, p in CASES]
)
def test_a_file_that_does_not_fit_is_named_and_nothing_is_lost(
    command: str,
    name: str,
    part: float,
    here: Path,
    begun: Path,
    whole: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    if command == "train":
        shutil.copytree(begun, out)
    size = int(part * max(path.stat().st_size for path in whole(command).rglob(name)))
    code, said = limited(words(here, command, out), name, size)
    line = check_failed(code, said, out)
    assert Path(line.split(": ")[2]).match(name), line
    assert "File too large" in line
    if command == "train":
        assert [damage(state) for state in states(out)] == [""] * len(states(out))
        before = {
            path: data
            for path, data in tree(begun).items()
            if path.startswith(("states/step-1", "step-1"))
        }
        assert before.items() <= tree(out).items()
    check_resumes(here, command, out, whole)


SIZES = (8, 16, 24, 32, 48)
"""KiB of a disk on which a run of about 60 KiB resumes, from its first step."""


@pytest.mark.parametrize("size", SIZES)
def test_a_disk_that_fills_up_during_a_run_is_reported_and_the_run_resumes_elsewhere(
    size: int, here: Path, begun: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    used = sum(
        -(-path.stat().st_size // 4096) * 4
        for path in begun.rglob("*")
        if path.is_file()
    )
    mount = ("mount", "-t", "tmpfs", "-o", f"size={used + size}k", "tmpfs", str(disk))
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        shutil.copytree(begun, disk / "out")
        code, said = limited(words(here, "train", disk / "out"))
        line = check_failed(code, said, disk / "out")
        assert "No space left on device" in line
        assert states(disk / "out")
        assert all(not damage(state) for state in states(disk / "out"))
        shutil.copytree(disk / "out", tmp_path / "out")
    finally:
        subprocess.run(("umount", str(disk)), check=True)
    check_resumes(here, "train", tmp_path / "out", whole)


def unwritable(folder: Path) -> None:
    """Put a file where the folder would be: not even root writes below it."""
    folder.write_text("")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written_is_named_before_any_model_is_loaded(
    command: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwritable(tmp_path / "file")
    monkeypatch.setattr(
        "dstrain.pipeline.pipeline.Pipeline.from_found",
        lambda *_: pytest.fail("a model is loaded"),
    )
    code, said = limited(words(here, command, tmp_path / "file/out"))
    check_failed(code, said, tmp_path / "file")
    assert (tmp_path / "file").read_text() == ""
