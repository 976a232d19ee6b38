"""A signal at any moment: training is saved within one step and resumes bit for bit;
anything else ends in time.
"""

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dstrain.cli.main import main
from dstrain.runs.checkpoints.directory import LOSS_CSV, states
from dstrain.runs.checkpoints.saved_states import damage, newest_state
from dstrain.storage import RUN
from dstrain.training import DecodedSamples

from tests.support.crashes import everything
from tests.support.family import weights_of
from tests.support.forks import fork
from tests.support.runs import log, project

pytestmark = [
    pytest.mark.promise(
        "R9", "a signal: saved within one step, exit 75, resumed bit for bit"
    ),
    pytest.mark.usefixtures("tiny"),
]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
BEFORE_LAST_STEP = 0.78
"""The part of a run's events in which a signal interrupts it: one that comes in the
last step changes nothing.
"""
RUNS = {
    "LoRA": ("--num_epochs", "3"),
    "full, saved at every step": ("--max_steps", "12", "--trainable_models", "dit", "--save_steps", "1"),
    "accumulation, cosine": (
        "--num_epochs", "4", "--gradient_accumulation_steps", "2", "--lr_scheduler", "cosine", "--save_steps", "3",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The run, the signal, and when it comes: a part of the run's events."""

    run: str
    number: int
    moment: float

    def __str__(self) -> str:
        return f"{self.run}, {signal.Signals(self.number).name} at {self.moment:.2f}"


CHANCE = random.Random(0)
CASES = tuple(
    Case(
        tuple(RUNS)[(trial + trial // 10) % 3],
        SIGNALS[trial % 3],
        BEFORE_LAST_STEP * CHANCE.random(),
    )
    for trial in range(36)
)


COMMANDS = {
    "stage 1": ("--task", "sft:data_process", "--feature_cache", "{0}/cache"),
    "generate": (
        *("generate", "--prompt", "a dog", "--num_inference_steps", "40"),
        *("--output", "{0}/a.png"),
    ),
}
OTHERS = tuple(
    (tuple(COMMANDS)[trial % 2], SIGNALS[trial % 3], 0.95 * CHANCE.random())
    for trial in range(12)
)


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
    model = ["--model", "tiny", "--model_paths", paths, *tokenizer]
    return [*command, *model, *data, *more[len(command) :]]


def signalled(
    line: list[str], number: int, event: int, stderr: Path
) -> tuple[int, int]:
    """Run a command line in a child that gets a signal at its event number `event`,
    from 0, or with -1 none.

    Events are those of Python's audit hooks (files, imports, a step's bookkeeping),
    counted in the main thread while signals are handled. stderr: the file that gets what
    is printed. Returns the exit code (-N: killed) and the events.
    """
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        status, seen, process = 1, 0, os.getpid()

        def look(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            is_main = (
                os.getpid() == process
                and threading.current_thread() is threading.main_thread()
            )
            if is_main and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                seen += 1
                if seen == event + 1:
                    os.kill(process, number)

        try:
            said = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.addaudithook(look)
            status = main(line)
        finally:
            os.write(writing, str(seen).encode())
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()  # one that hangs ends with its stacks (forks.py)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(answer or -1)


def undisturbed(line: list[str], stderr: Path) -> int:
    """Run a command line without a signal; returns how many events it has."""
    code, seen = signalled(line, 0, -1, stderr)
    assert code == 0, stderr.read_text()
    return seen


@pytest.fixture(scope="module")
def whole(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """Name of a run -> its events, and all that it leaves, undisturbed."""

    @cache
    def make(name: str) -> tuple[int, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("whole")
        line = words(here, *RUNS[name], "--output_path", str(folder / "out"))
        return undisturbed(line, folder / "stderr"), everything(folder / "out")

    return make


def check_message(stderr: str) -> None:
    """One line says that it was interrupted, and one how to resume; no traceback."""
    assert "Traceback" not in stderr
    assert stderr.count("dstrain: error: ") == 1, stderr


def check_same(out: Path, wanted: dict[str, Any], stopped: int) -> None:
    """A run that went on after step `stopped` left what an undisturbed one leaves.

    Beside it, it has the weights that it saved there; which older states are kept
    depends on where it was.
    """
    ended, newest = everything(out), f"states/{states(out)[0].name}/"
    of_states = {name for name in wanted | ended if name.startswith("states/")}
    older = {name for name in of_states if not name.startswith(newest)}
    for name in wanted.keys() - (older - ended.keys()) - {RUN}:
        assert ended.get(name) == wanted[name], name
    assert ended.keys() - wanted.keys() - older <= {f"step-{stopped}.safetensors"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_signalled_run_is_saved_within_one_step_and_resumes_bit_for_bit(
    case: Case,
    here: Path,
    tmp_path: Path,
    whole: Any,
    counted: Callable[[str, int], None],
) -> None:
    total, wanted = whole(case.run)
    out, stderr = tmp_path / "out", tmp_path / "stderr"
    line = words(here, *RUNS[case.run], "--output_path", str(out))
    code, _ = signalled(line, case.number, int(case.moment * total), stderr)
    said = stderr.read_text()
    assert code == 75, said
    check_message(said)
    assert not list(out.rglob(".tmp-*"))
    assert all(not damage(state) for state in states(out))
    stopped = int(log(out)[-1]["step"]) if (out / LOSS_CSV).exists() and log(out) else 0
    if stopped:
        assert newest_state(out).name == f"step-{stopped}"
        assert "run the same command with --resume" in said
    counted("interrupted", 1)
    begun = ["--resume"] if "--resume" in said else []
    undisturbed([*line, *begun], stderr)
    check_same(out, wanted, stopped)


@pytest.mark.parametrize(
    ("name", "number", "moment"),
    OTHERS,
    ids=[f"{name}, {number.name} at {at:.2f}" for name, number, at in OTHERS],
)
def test_stage_1_and_inference_end_in_time_with_words_that_fit_and_nothing_half_written(
    name: str, number: int, moment: float, here: Path, tmp_path: Path
) -> None:
    lines = {}
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
        typed = [word.format(tmp_path / folder) for word in COMMANDS[name]]
        lines[folder] = words(here, *typed)
    total = undisturbed(lines["whole"], tmp_path / "stderr")
    code, _ = signalled(lines["cut"], number, int(moment * total), tmp_path / "stderr")
    said = (tmp_path / "stderr").read_text()
    assert code == 75, said
    check_message(said)
    assert "--resume" not in said
    assert not list((tmp_path / "cut").rglob(".tmp-*"))
    undisturbed(lines["cut"], tmp_path / "stderr")
    whole, cut = (
        {path.name for path in (tmp_path / folder).rglob("*")} for folder in lines
    )
    assert whole == cut


BOTH_STAGES = tuple(
    (SIGNALS[trial % 3], BEFORE_LAST_STEP * CHANCE.random(), bool(trial % 2))
    for trial in range(10)
)
"""The signal, when it comes, and whether stage 1 has nothing to do."""


def in_both_stages(here: Path, folder: Path) -> list[str]:
    """A command line that runs both stages, with its folders in this one."""
    cache = ["--feature_cache", str(folder / "cache")]
    output = ["--output_path", str(folder / "out")]
    return words(here, *RUNS["LoRA"], *cache, *output)


@pytest.fixture(scope="module")
def both_stages(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[int, int], dict[str, Any]]:
    """A full cache; the events of such a command, without and with a full cache; and all
    that it leaves, undisturbed.
    """
    # Imports, which are most of the events of a command, are made here once.
    assert main(in_both_stages(here, tmp_path_factory.mktemp("warm"))) == 0
    folder = tmp_path_factory.mktemp("both")
    line, stderr = in_both_stages(here, folder), folder / "stderr"
    totals = undisturbed(line, stderr), undisturbed([*line, "--overwrite"], stderr)
    return folder / "cache", totals, everything(folder / "out")


@pytest.mark.parametrize(
    ("number", "moment", "is_cached"),
    BOTH_STAGES,
    ids=[f"{number.name} at {moment:.2f}" for number, moment, _ in BOTH_STAGES],
)
def test_a_command_of_both_stages_is_signalled_in_either_and_repeated(
    number: int,
    moment: float,
    is_cached: bool,
    here: Path,
    tmp_path: Path,
    both_stages: tuple[Path, tuple[int, int], dict[str, Any]],
    counted: Callable[[str, int], None],
) -> None:
    cache, totals, wanted = both_stages
    out, stderr = tmp_path / "out", tmp_path / "stderr"
    line = in_both_stages(here, tmp_path)
    if is_cached:
        shutil.copytree(cache, tmp_path / "cache")
    code, _ = signalled(line, number, int(moment * totals[is_cached]), stderr)
    said = stderr.read_text()
    assert code == 75, said
    check_message(said)
    assert not list(tmp_path.rglob(".tmp-*"))
    begun = ["--resume"] if "--resume" in said else []
    assert ("run the same command again\n" in said) is (not begun), said
    counted("interrupted", 1)
    counted("before stage 2", not out.exists())
    stopped = int(log(out)[-1]["step"]) if (out / LOSS_CSV).exists() and log(out) else 0
    undisturbed([*line, *begun], stderr)
    check_same(out, wanted, stopped)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_run_whose_loader_gets_it_too_and_it_is_saved(
    number: int, steps: int, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a launcher that sends it to every process."""
    out, parent = tmp_path / "out", os.getpid()
    real = DecodedSamples.sample
    calls: list[int] = []

    def sample(source: DecodedSamples, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == steps + 1:
            main_process = os.getppid()
            assert main_process != parent
            # The step before is computed meanwhile.
            while not (out / LOSS_CSV).exists() or len(log(out)) < steps:
                time.sleep(0.01)
            os.kill(main_process, number)
            os.kill(os.getpid(), number)
        return real(source, *arguments)

    monkeypatch.setattr(DecodedSamples, "sample", sample)
    line = words(here, "--num_epochs", "1", "--dataset_num_workers", "1")
    line += ["--output_path", str(out)]
    code, _ = signalled(line, 0, -1, tmp_path / "stderr")
    said = (tmp_path / "stderr").read_text()
    assert code == 75, said
    check_message(said)
    # One more if its sample came before the signal was seen.
    saved = [f"step-{step}" for step in (steps, steps + 1)]
    assert newest_state(out).name in saved
    assert not damage(newest_state(out))
