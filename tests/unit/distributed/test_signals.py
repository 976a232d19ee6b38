"""A signal stops a run at a step boundary, saved; out of memory says what did not fit."""

import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Interrupted, OutOfMemory, StateError, run
from dstrain.cli.main import main
from dstrain.distributed import catch_stop_signals, interrupt_on_signals

from tests.support.runs import config, outcome, project, same, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("interrupt"))


def signal_at(
    step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM
) -> None:
    """Send this process a signal while it makes a step."""
    from dstrain.runs import loop as train

    update, calls = train.update, []

    def watched(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return update(*arguments)

    monkeypatch.setattr(train, "update", watched)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_run_is_saved_within_the_step_and_resumes_bit_for_bit(
    number: int, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config(here, output_path=tmp_path / "whole", num_epochs=2))
    with monkeypatch.context() as patched:
        signal_at(4, patched, number)
        with pytest.raises(
            Interrupted, match="after step 4 of 12, where it was saved"
        ) as stopped:
            run(config(here, output_path=tmp_path / "cut", num_epochs=2))
    assert stopped.value.exit_code == 75
    run(config(here, output_path=tmp_path / "cut", num_epochs=2, resume="auto"))
    whole, cut = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    assert cut["files"].pop("step-4.safetensors")
    assert cut["names"].pop(cut["names"].index("step-4.safetensors"))
    assert same(whole, cut)


def test_handlers_are_restored_and_a_second_signal_acts_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with catch_stop_signals() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_outside_a_loop_ends_as_one_error_and_a_second_one_kills() -> None:
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    for number in before:
        words = "dstrain: error: command: interrupted\n  run the same command again"
        with (
            pytest.raises(Interrupted, match=words) as caught,
            interrupt_on_signals(),
        ):
            os.kill(os.getpid(), number)
            signal.pause()
        assert caught.value.exit_code == 75
        assert {each: signal.getsignal(each) for each in before} == before
    with pytest.raises(Interrupted), interrupt_on_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            assert {signal.getsignal(each) for each in before} == {signal.SIG_DFL}


def test_a_second_signal_during_saving_ends_the_run_at_once_and_the_third_kills() -> (
    None
):
    with (
        pytest.raises(Interrupted),
        interrupt_on_signals(),
        catch_stop_signals() as asked,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def lost_interrupt(*_: Any, **__: Any) -> None:
    """Get Ctrl-C, and raise what torch raises in its place while it reads a tensor."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape of object type") from None


def test_an_error_in_place_of_a_keyboard_interrupt_counts_as_one(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted), interrupt_on_signals():
        lost_interrupt()
    with pytest.raises(ValueError, match="shape"), interrupt_on_signals():
        raise ValueError("shape")
    monkeypatch.setattr("dstrain.pipeline.pipeline.Pipeline.from_found", lost_interrupt)
    with (
        pytest.raises(Interrupted, match="before the first step"),
        interrupt_on_signals(),
    ):
        run(config(here, output_path=tmp_path))


def test_a_dstrain_error_after_a_signal_stays_what_it_is() -> None:
    with pytest.raises(StateError), interrupt_on_signals():
        try:
            lost_interrupt()
        except ValueError:
            raise StateError("states/step-1", "is damaged") from None


def test_copies_of_a_signal_that_reach_a_launched_process_later_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    earlier = {number: signal.getsignal(number) for number in numbers}
    try:
        with pytest.raises(Interrupted), interrupt_on_signals():
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is not earlier[signal.SIGINT]
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def test_a_terminal_that_goes_away_ends_nothing_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with (
            catch_stop_signals() as asked,
            interrupt_on_signals(),
        ):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked()
    finally:
        signal.signal(signal.SIGHUP, before)


def interrupted_at(
    place: str, here: Path, output: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> Interrupted:
    """What a run says in which Ctrl-C comes at a call of this function."""

    def pressed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(Interrupted) as stopped:
        patched.setattr(place, pressed)
        run(config(here, output_path=output, max_steps=4, **flags))
    return stopped.value


def test_a_run_that_is_interrupted_says_how_to_resume(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, saving, training = (
        "dstrain.pipeline.pipeline.Pipeline.from_found",
        "dstrain.runs.checkpoints.outputs.save_state",
        "dstrain.runs.loop.update",
    )
    printed = interrupted_at(loading, here, tmp_path, monkeypatch)
    assert (
        printed.what == "interrupted before the first step; nothing there was changed"
    )
    assert printed.help_lines == ("run the same command again",)
    printed = interrupted_at(training, here, tmp_path, monkeypatch)
    assert (printed.what, *printed.help_lines) == (
        "interrupted before the first save",
        "run the same command again",
    )
    printed = interrupted_at(saving, here, tmp_path, monkeypatch, save_steps=1)
    assert printed.help_lines == ("run the same command again with --overwrite",)
    run(config(here, output_path=tmp_path, max_steps=1, overwrite=True))
    printed = interrupted_at(training, here, tmp_path, monkeypatch, resume="auto")
    assert printed.what == "interrupted"
    assert printed.help_lines == ("run the same command with --resume",)
    printed = interrupted_at(loading, here, tmp_path, monkeypatch, overwrite=True)
    assert printed.help_lines == ("run the same command again",)
    assert (tmp_path / "states/step-1").is_dir()
    with monkeypatch.context() as patched:
        signal_at(2, patched)
        with pytest.raises(Interrupted, match="with --resume instead of --overwrite"):
            run(config(here, output_path=tmp_path, max_steps=4, overwrite=True))


@pytest.mark.parametrize(
    ("flag", "file", "advice"),
    [
        ("resume_from_checkpoint", "step-1.safetensors", " with another --output_path"),
        ("resume", "states/step-1", ""),
    ],
)
def test_advice_before_the_first_save_fits_the_flag_that_the_run_starts_from(
    flag: str,
    file: str,
    advice: str,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = train(here, output_path=tmp_path / "first", max_steps=1)
    flags: dict[str, Any] = {flag: first / file if advice else str(first / file)}
    out = tmp_path / "out"
    training, saving = (
        "dstrain.runs.loop.update",
        "dstrain.runs.checkpoints.outputs.save_state",
    )
    printed = interrupted_at(training, here, out, monkeypatch, **flags)
    assert printed.help_lines == ("run the same command again",)
    printed = interrupted_at(saving, here, out, monkeypatch, save_steps=2, **flags)
    assert printed.what == "interrupted before the first save"
    assert printed.help_lines == (f"run the same command again{advice}",)
    if advice:
        with pytest.raises(StateError, match="already contains a run"):
            run(config(here, output_path=out, max_steps=4, **flags))
        out = tmp_path / "another"
    run(config(here, output_path=out, max_steps=4, **flags))


NO_MEMORY = {
    "CUDA": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    "CPU": RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
    "Python": MemoryError(),
}
PLACES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "loading": (
        "dstrain.pipeline.pipeline.Pipeline.from_found",
        {},
        "loading: out of memory",
        "--feature_cache",
    ),
    "training": (
        "dstrain.runs.loop.update",
        {},
        "step 1: out of memory",
        "--use_gradient_checkpointing",
    ),
    "stage 1": (
        "dstrain.runs.stage_1.precompute.compute",
        {"task": "sft:data_process"},
        "stage 1: out of memory",
        "--max_pixels",
    ),
}


@pytest.mark.parametrize("kind", NO_MEMORY)
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_is_explained_wherever_it_comes_with_the_flags_that_lower_it_there(
    place: str, kind: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, flags, words, advice = PLACES[place]

    def full(*_: Any, **__: Any) -> Any:
        raise NO_MEMORY[kind]

    monkeypatch.setattr(function, full)
    with pytest.raises(OutOfMemory, match=words) as caught:
        run(config(here, output_path=tmp_path, **flags))
    assert caught.value.exit_code == 6
    assert advice in " ".join(caught.value.help_lines)


def test_out_of_memory_in_inference_is_explained(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise NO_MEMORY["CPU"]

    monkeypatch.setattr("dstrain.pipeline.pipeline.Pipeline.from_found", full)
    assert (
        main(
            [
                "generate",
                "--model",
                "tiny",
                "--toy",
                "--prompt",
                "a",
                "--output",
                str(tmp_path / "a.png"),
            ]
        )
        == 6
    )
    printed = capsys.readouterr().err
    assert printed.startswith("dstrain: error: generate: out of memory")
    assert "--height" in printed


def test_another_error_of_the_same_kind_is_not_taken_for_out_of_memory(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("dstrain.runs.loop.update", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        run(config(here, output_path=tmp_path))


def test_out_of_memory_names_the_step_the_shapes_and_the_flags(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("dstrain.runs.loop.update", full)
    run(config(here, task="sft:data_process", feature_cache=tmp_path / "cache"))
    with pytest.raises(OutOfMemory, match="step 1: out of memory") as error:
        run(
            config(
                here,
                task="sft:train",
                feature_cache=tmp_path / "cache",
                output_path=tmp_path / "out",
                batch_size=2,
            )
        )
    assert error.value.exit_code == 6
    printed = " ".join(error.value.help_lines)
    assert "input_latents [1, " in printed
    assert "--batch_size" in printed
    assert "--use_gradient_checkpointing" in printed


def test_out_of_memory_names_the_line_of_the_row_and_what_was_in_use(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("dstrain.runs.loop.update", full)
    with pytest.raises(OutOfMemory) as caught:
        run(config(here, output_path=tmp_path))
    printed = re.fullmatch(
        r"out of memory at (.*) GiB with 1 sample like metadata\.json:[1-6]",
        caught.value.what,
    )
    assert printed is not None and float(printed[1]) > 0


@pytest.mark.parametrize("trained", ["lora", "dit"])
def test_the_command_said_at_the_end_makes_an_image(
    trained: str,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = {} if trained == "lora" else {"trainable_models": "dit"}
    run(config(here, output_path=tmp_path / "out", **full))
    said = next(
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("try them: ")
    )
    words = shlex.split(said.removeprefix("try them: "))
    assert words[:2] == ["dstrain", "generate"]
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                *words[1:],
                "--height",
                "16",
                "--width",
                "16",
                "--num_inference_steps",
                "1",
            ]
        )
        == 0
    )
    assert (tmp_path / "image.png").exists()
