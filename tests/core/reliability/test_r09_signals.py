"""A signal at any moment: training is saved within one step and goes on bit for bit; anything else ends in time."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import everything
from dstrain.checkpoint import damage, newest_state, states
from dstrain.cli import main
from dstrain.run_files import traces
from family import weights_of
from runs import log, project

pytestmark = [
    pytest.mark.promise("R9", "a signal: saved within one step, exit 75, resumed bit for bit"),
    pytest.mark.usefixtures("tiny"),
]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIMIT = 60.0
"""Seconds in which a process has to end."""
RUNS = {
    "LoRA": ("--num_epochs", "3"),
    "full, saved at every step": ("--max_steps", "12", "--trainable_models", "dit", "--save_steps", "1"),
    "accumulation, cosine": (
        "--num_epochs", "4", "--gradient_accumulation_steps", "2", "--lr_scheduler", "cosine", "--save_steps", "3",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The run, the signal, and when it comes: a part of the time that the run takes, from its start."""

    run: str
    number: int
    moment: float

    def __str__(self) -> str:
        return f"{self.run}, {signal.Signals(self.number).name} at {self.moment:.2f}"


CHANCE = random.Random(0)
CASES = tuple(
    Case(tuple(RUNS)[(trial + trial // 10) % 3], SIGNALS[trial % 3], 0.1 + 0.95 * CHANCE.random())
    for trial in range(36)
)


COMMANDS = {
    "stage 1": ("--task", "sft:data_process", "--feature_cache", "{0}/cache"),
    "generate": ("generate", "--prompt", "a dog", "--num_inference_steps", "40", "--output", "{0}/a.png"),
}
OTHERS = tuple((tuple(COMMANDS)[trial % 2], SIGNALS[trial % 3], 0.1 + 0.9 * CHANCE.random()) for trial in range(12))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout."""
    return project(tmp_path_factory.mktemp("signals"), dropout=0.2)


def words(here: Path, *more: str) -> list[str]:
    """A command line of the project: training, unless it begins with another command."""
    command = [more[0]] if more[:1] == ("generate",) else []
    data = [] if command else ["--dataset_base_path", str(here / "data")]
    paths = json.dumps(list(weights_of(here / "model").values()))
    tokenizer = ["--tokenizer_path", str(here / "model/tokenizer")]
    return [*command, "--model", "tiny", "--model_paths", paths, *tokenizer, *data, *more[len(command) :]]


def signalled(line: list[str], number: int, after: float, told: Path) -> int:
    """Run a command line in a child, send it a signal after some seconds, and return its exit code (-N: killed).

    told: the file that gets what it prints.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            said = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            for each in SIGNALS:
                signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
            (told.parent / "started").touch()
            status = main(line)
        finally:
            os._exit(status)
    while not (told.parent / "started").exists():
        time.sleep(0.001)
    (told.parent / "started").unlink()
    time.sleep(after)
    os.kill(child, number)
    deadline = time.monotonic() + LIMIT
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        assert time.monotonic() < deadline, "it goes on after the signal"
        time.sleep(0.005)


def timed(line: list[str], told: Path) -> float:
    """How long a command line takes, undisturbed, in a child."""
    start = time.monotonic()
    assert signalled(line, 0, 0.0, told) == 0, told.read_text()
    return time.monotonic() - start


@pytest.fixture(scope="module")
def whole(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[float, dict[str, Any]]]:
    """Name of a run -> the seconds it takes, and all that it leaves, undisturbed."""

    @cache
    def make(name: str) -> tuple[float, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("whole")
        line = words(here, *RUNS[name], "--output_path", str(folder / "out"))
        return timed(line, folder / "told"), everything(folder / "out")

    return make


def check_told(told: str, code: int) -> None:
    """One line says what happened, and one how to go on; no traceback."""
    assert "Traceback" not in told
    assert (code == 75) == ("dstrain: error: " in told), told


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_signalled_run_is_saved_within_one_step_and_goes_on_bit_for_bit(
    case: Case, here: Path, tmp_path: Path, whole: Any, counted: Callable[[str, int], None]
) -> None:
    seconds, wanted = whole(case.run)
    out, told = tmp_path / "out", tmp_path / "told"
    line = words(here, *RUNS[case.run], "--output_path", str(out))
    code = signalled(line, case.number, case.moment * seconds, told)
    said = told.read_text()
    assert code in (0, 75), said
    check_told(said, code)
    assert not list(out.rglob(".tmp-*"))
    assert all(not damage(state) for state in states(out))
    if code == 75 and (out / "loss.csv").exists() and log(out):
        assert newest_state(out).name == f"state-{log(out)[-1]['step']:.0f}"
        assert "run the same command with --resume" in said
    counted("interrupted", code == 75)
    begun = ["--resume"] if states(out) else ["--overwrite"] if traces(out) else []
    assert signalled([*line, *begun], 0, 0.0, told) == 0, told.read_text()
    ended = everything(out)
    assert {name: ended[name] for name in wanted if name in ended and name != "weights.json"} == {
        name: wanted[name] for name in wanted if name in ended and name != "weights.json"
    }
    assert {"log", f"{states(out)[0].name}/trainable.safetensors"} <= ended.keys() & wanted.keys()


@pytest.mark.parametrize(
    ("name", "number", "moment"), OTHERS, ids=[f"{name}, {number.name} at {at:.2f}" for name, number, at in OTHERS]
)
def test_stage_1_and_inference_end_in_time_with_words_that_fit_and_nothing_half_written(
    name: str, number: int, moment: float, here: Path, tmp_path: Path
) -> None:
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    lines = {
        folder: words(here, *(word.format(tmp_path / folder) for word in COMMANDS[name])) for folder in ("whole", "cut")
    }
    seconds = timed(lines["whole"], tmp_path / "told")
    code = signalled(lines["cut"], number, moment * seconds, tmp_path / "told")
    said = (tmp_path / "told").read_text()
    assert code in (0, 75), said
    check_told(said, code)
    assert "--resume" not in said
    assert not list((tmp_path / "cut").rglob(".tmp-*"))
    assert signalled(lines["cut"], 0, 0.0, tmp_path / "told") == 0
    left = {folder: {path.name for path in (tmp_path / folder).rglob("*")} for folder in ("whole", "cut")}
    assert left["whole"] == left["cut"]
