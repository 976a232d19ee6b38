"""Every failure is one line WHERE: WHAT, with its exit code."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import Diverged, Interrupted, TrainConfig
from dstrain.cli.main import main

from tests.support.command_lines import BASE

Install = Callable[..., Path]
Source = Callable[..., str]


def answer_of(
    body: Callable[[TrainConfig], None], monkeypatch: pytest.MonkeyPatch, *more: str
) -> int:
    monkeypatch.setattr(sys.modules["dstrain.runs.runner"], "start", body)
    return main([*BASE, *more])


@pytest.mark.parametrize(
    ("words", "first_line"),
    [
        (["--seed", "3"], "--model: is required"),
        (["--model", "fakyy"], "--model: no model named 'fakyy'; installed: "),
        (
            [*BASE, "--batchsize", "3"],
            "--batchsize: no such option; did you mean '--batch_size'?",
        ),
        (
            [*BASE, "--tokeniser_path", "3"],
            "--tokeniser_path: no such option; did you mean '--tokenizer_path'?",
        ),
        ([*BASE, "--seed", "x"], "--seed: 'x' is not a valid integer"),
        ([*BASE, "--seed"], "--seed: option '--seed' requires an argument"),
        ([*BASE, "--height", "512"], "--height: is given without --width"),
        (
            [*BASE, "--variant", "edti"],
            "--variant: faky has no variant 'edti'; variants: base, edit; did you mean 'edit'?",
        ),
        ([*BASE, "--output_path", ""], "--output_path: is empty"),
        ([*BASE, "stray"], "command line: got unexpected extra argument (stray)"),
        (
            ["grph"],
            "command line: no command named 'grph'; commands: train, graph, generate, ",
        ),
        (["-p", "nope", *BASE], "-p: expected no:NAME, got 'nope'"),
        (["-p", "no:fakyy", *BASE], "-p: no plugin named 'fakyy'; installed: "),
        (["-p", "no:faky", *BASE], "--model: no model named 'faky'; installed: "),
        (
            [*BASE, "-p", "no:plugin-faky"],
            "--model: no model named 'faky'; installed: ",
        ),
        (["toy", "--model", "faky"], "--output: is required"),
        (
            ["export", "a", "b", "--format", "komfy"],
            "--format: 'komfy' is not one of 'diffusers', 'comfyui', 'kohya', 'diffsynth'",
        ),
        (
            ["generate", "--prompt", "a", "--output", "x.png"],
            "--run: is required: the output folder of a training run",
        ),
        (
            ["generate", "--model", "faky", "--toy", "--output", "x.png"],
            "--prompt: is required",
        ),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else "",
)
def test_errors_have_one_form(
    runs: list[TrainConfig],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    first_line: str,
) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"dstrain: error: {first_line}")
    assert len(lines) <= 4
    assert not runs


def test_no_family_flags_without_a_model_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--kontext_pixels", "64"]) == 2
    # It is near to --max_pixels, which is not meant.
    assert capsys.readouterr().err.splitlines() == [
        "dstrain: error: --kontext_pixels: is a flag of flux, and no model is named",
        "  give --model or --model_id",
    ]
    assert main(["--model", "wan", "--kontext_pixels", "64"]) == 2
    assert "is a flag of flux, not of wan" in capsys.readouterr().err
    assert main(["--max_pixls", "64"]) == 2
    assert "did you mean '--max_pixels'?" in capsys.readouterr().err


def test_the_runners_errors_keep_their_exit_codes(
    runs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code in (
        (Diverged("step 3", "loss is NaN"), 5),
        (Interrupted("step 3", "saved"), 75),
        (KeyboardInterrupt(), 75),
        (OSError(28, "No space left on device", "out/x"), 4),
        (RuntimeError("a defect"), 1),
    ):

        def raises(config: TrainConfig, error: BaseException = error) -> None:
            raise error

        assert answer_of(raises, monkeypatch) == code


def test_tracebacks_need_debug(
    runs: list[TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raises(config: TrainConfig) -> None:
        raise ValueError("deep inside")

    assert answer_of(raises, monkeypatch) == 1
    plain = capsys.readouterr().err
    assert (
        "ValueError: deep inside" in plain.splitlines()[0] and "Traceback" not in plain
    )
    assert plain.startswith("dstrain: error: ")
    assert answer_of(raises, monkeypatch, "--debug") == 1
    assert "Traceback" in capsys.readouterr().err
