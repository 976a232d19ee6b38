"""A signal stops a run at a step boundary, saved; out of memory says what did not fit."""

import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.cli import main
from dstrain.errors import Interrupted, OutOfMemory
from dstrain.interrupt import asked_to_stop
from dstrain.runner import run
from runs import config, outcome, project, same

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("interrupt"))


def signal_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """Send this process a signal while it makes a step."""
    from dstrain import train

    update, calls = train.update, []

    def watched(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return update(*arguments)

    monkeypatch.setattr(train, "update", watched)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_is_saved_within_the_step_and_resumes_bit_for_bit(
    number: int, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config(here, output_path=tmp_path / "whole", num_epochs=2))
    with monkeypatch.context() as patched:
        signal_at(4, patched, number)
        with pytest.raises(Interrupted, match="after step 4 of 12, where it was saved") as stopped:
            run(config(here, output_path=tmp_path / "cut", num_epochs=2))
    assert stopped.value.exit_code == 75
    run(config(here, output_path=tmp_path / "cut", num_epochs=2, resume="auto"))
    whole, cut = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    assert cut["files"].pop("step-4.safetensors")
    assert cut["names"].pop(cut["names"].index("step-4.safetensors"))
    assert same(whole, cut)


def test_handlers_are_put_back_and_a_second_signal_acts_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with asked_to_stop() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_out_of_memory_names_the_step_the_shapes_and_the_flags(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("dstrain.train.update", full)
    run(config(here, task="sft:data_process", feature_cache=tmp_path / "cache"))
    with pytest.raises(OutOfMemory, match="step 1: out of memory") as error:
        run(
            config(here, task="sft:train", feature_cache=tmp_path / "cache", output_path=tmp_path / "out", batch_size=2)
        )
    assert error.value.exit_code == 6
    told = " ".join(error.value.help_lines)
    assert "input_latents [1, " in told
    assert "--batch_size" in told
    assert "--use_gradient_checkpointing" in told


@pytest.mark.parametrize("trained", ["lora", "dit"])
def test_the_command_said_at_the_end_makes_a_picture(
    trained: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {} if trained == "lora" else {"trainable_models": "dit"}
    run(config(here, output_path=tmp_path / "out", **full))
    said = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("try them: "))
    words = shlex.split(said.removeprefix("try them: "))
    assert words[:2] == ["dstrain", "generate"]
    monkeypatch.chdir(tmp_path)
    assert main([*words[1:], "--height", "16", "--width", "16", "--num_inference_steps", "1"]) == 0
    assert (tmp_path / "picture.png").exists()
