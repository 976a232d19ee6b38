"""A signal stops a run at a step boundary, saved; out of memory says what did not fit.

Signals are raised in the thread that handles them: one that is sent to the process may be
handled later.
"""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Interrupted, OutOfMemory, TrainingModule, run
from dstrain.distributed import catch_stop_signals, interrupt_on_signals

from tests.support.runs import changed, config, project, train

pytestmark = pytest.mark.usefixtures("tiny")
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOADING = "dstrain.Pipeline.from_found"
STEP = "dstrain.TrainingModule.forward"
SAVING = "dstrain.runs.checkpoints.outputs.save_state"
ENCODING = "dstrain.graph.unit.Unit.run"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("interrupt"))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore what a failing test leaves."""
    before = {number: signal.getsignal(number) for number in STOP}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(error: BaseException) -> Callable[..., Any]:
    def body(*given: Any, **named: Any) -> Any:
        raise error

    return body


@contextmanager
def failing(place: str, body: Callable[..., Any]) -> Iterator[None]:
    """Call this in place of what stands at a dotted place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, body)
        yield


def at_step(step: int, body: Callable[..., Any]) -> type[TrainingModule]:
    """A module that does something before its forward pass of a step."""
    steps = count(1)
    return changed(lambda module: body() if next(steps) == step else None)


@pytest.mark.parametrize("launcher", [{}, {"WORLD_SIZE": "1"}])
def test_handlers_are_restored_and_a_second_signal_acts_as_before(
    launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGINT)
    with catch_stop_signals() as asked:
        assert not asked()
        signal.raise_signal(signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", STOP)
def test_a_signal_outside_a_loop_is_one_error_then_it_kills(number: int) -> None:
    before = {each: signal.getsignal(each) for each in STOP}
    with pytest.raises(Interrupted) as caught, interrupt_on_signals():
        try:
            signal.raise_signal(number)
        finally:
            assert {signal.getsignal(each) for each in STOP} == {signal.SIG_DFL}
    assert caught.value.exit_code == 75
    assert {each: signal.getsignal(each) for each in STOP} == before


def test_a_second_signal_during_saving_ends_the_run_and_a_third_kills() -> None:
    with (
        pytest.raises(Interrupted),
        interrupt_on_signals(),
        catch_stop_signals() as asked,
    ):
        signal.raise_signal(signal.SIGTERM)
        assert asked()
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_copies_of_a_signal_that_reach_a_launched_process_later_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted), interrupt_on_signals():
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is not before


def advised(place: str, here: Path, output: Path, **flags: Any) -> list[str]:
    """The flags in what a run advises in which Ctrl-C comes there."""
    pressed = raising(KeyboardInterrupt())
    with pytest.raises(Interrupted) as stopped, failing(place, pressed):
        train(here, output_path=output, max_steps=4, **flags)
    (advice,) = stopped.value.help_lines
    return re.findall("--[a-z_]+", advice)


def test_an_interrupted_run_says_how_to_go_on(here: Path, tmp_path: Path) -> None:
    assert advised(LOADING, here, tmp_path) == []
    assert advised(STEP, here, tmp_path) == ["--resume"]
    assert advised(SAVING, here, tmp_path, save_steps=1) == ["--resume"]
    train(here, output_path=tmp_path, max_steps=1, overwrite=True)
    assert advised(STEP, here, tmp_path, resume="auto") == ["--resume"]
    assert advised(LOADING, here, tmp_path, overwrite=True) == []
    assert (tmp_path / "states/step-1").is_dir()
    again = config(here, output_path=tmp_path, max_steps=4, overwrite=True)
    with pytest.raises(Interrupted, match=r"--resume .* --overwrite"):
        run(again, at_step(2, lambda: signal.raise_signal(signal.SIGTERM)))


NO_MEMORY = {
    "CUDA": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    "CPU": RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
    "Python": MemoryError(),
}


@pytest.mark.parametrize("error", NO_MEMORY.values(), ids=NO_MEMORY)
@pytest.mark.parametrize(
    ("place", "flags", "where", "advice"),
    [
        (LOADING, {}, "loading", "--feature_cache"),
        (STEP, {}, "step 1", "--use_gradient_checkpointing"),
        (ENCODING, {"task": "sft:data_process"}, "stage 1", "--max_pixels"),
    ],
)
def test_out_of_memory_is_told_wherever_it_comes_with_the_flags_that_lower_it_there(
    place: str,
    flags: dict[str, Any],
    where: str,
    advice: str,
    error: Exception,
    here: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(OutOfMemory) as caught, failing(place, raising(error)):
        train(here, output_path=tmp_path, **flags)
    assert caught.value.exit_code == 6
    assert caught.value.where == where
    assert advice in " ".join(caught.value.help_lines)


def test_out_of_memory_names_the_row_what_was_in_use_the_shapes_and_the_flags(
    here: Path, tmp_path: Path
) -> None:
    full = raising(MemoryError())
    with pytest.raises(OutOfMemory) as caught, failing(STEP, full):
        train(here, output_path=tmp_path / "out")
    printed = re.search(r" (.*) GiB .*metadata\.json:[1-6]$", caught.value.what)
    assert printed is not None and float(printed[1].split()[-1]) > 0
    store = {"feature_cache": tmp_path / "cache"}
    run(config(here, task="sft:data_process", **store))
    two = {"batch_size": 2, "output_path": tmp_path / "two"}
    with pytest.raises(OutOfMemory) as caught, failing(STEP, full):
        train(here, task="sft:train", **store, **two)
    told = " ".join(caught.value.help_lines)
    for part in ("input_latents [1, ", "--batch_size", "--use_gradient_checkpointing"):
        assert part in told
