"""What a run says at its start and at its end: all that a user wants to know before
leaving it alone.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from dstrain.console import PAGE_WIDTH
from dstrain.runs.reports import summary
from dstrain.runs.reports.summary import RunStatistics, _layer_lines

from tests.support.runs import log, project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_the_start_says_how_weights_are_kept_and_counts_them_as_without(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(here, output_path=tmp_path / "plain", max_steps=1)
    share = re.compile(r"128 parameters, ([\d.]+)% of those used")
    plain = share.findall(said(capsys))
    flags = {"quant_options": "dit:bitsandbytes_nf4", "blocks_to_swap": 1}
    train(here, output_path=tmp_path / "kept", max_steps=1, **flags)
    printed = said(capsys)
    assert "dit: bitsandbytes_nf4, 1 block swapped\n" in printed
    assert share.findall(printed) == plain


def test_the_start_says_samples_shapes_batch_schedule_and_previews(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_epochs": 3,
        "seed": 7,
    }
    flags |= {
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 2,
        "preview_prompt": ("dog", "cat"),
    }
    train(here, output_path=tmp_path, dataset_repeat=2, preview_steps=100, **flags)
    printed = said(capsys)
    for words in (
        "device cpu, mixed precision no, 1 process\n",
        "training dit: 128 parameters, 19.4% of those used in a step\n",
        "LoRA on dit: to_q x2, to_out x2\n",
        "6 samples x 2 in 2 shapes, 4 steps per epoch\n",
        "runs to step 12, 3 epochs\n",
        "batch: 1 process x 2 x 2 accumulated = 4 samples per step\n",
        "adamw, learning rate 0.01, constant_with_warmup\n",
        "seed 7\n",
        f"writing to {tmp_path}\n",
    ):
        assert words in printed, words
    assert (
        printed.index("samples x")
        < printed.index("preview ")
        < printed.index("12 steps in ")
    )


def test_a_layer_and_its_count_are_on_one_line() -> None:
    names = ("to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj")
    for length in range(10):
        layers = {f"{name}{'_' * length}": 60 for name in names}
        first, *others = lines = _layer_lines("dit", layers)
        assert first.startswith("LoRA on dit: to_q") and others
        assert all(re.fullmatch(r".* x60,?", line) for line in lines)
        assert max(map(len, lines)) <= PAGE_WIDTH
        assert " ".join(map(str.strip, lines)).isascii()


def test_stage_2_says_what_is_stored_and_where_the_run_ends(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("sft:data_process", "sft:train"):
        train(
            here,
            task=task,
            feature_cache=tmp_path / "cache",
            output_path=tmp_path / "out",
            max_steps=1,
        )
    printed = said(capsys)
    assert "6 samples x 1 in 2 shapes, 6 steps per epoch\n" in printed
    assert "runs to step 1, 0.1667 epochs\n" in printed


@pytest.mark.parametrize(
    ("max_steps", "ending"),
    [
        (5, "runs to step 5, 0.8333 epochs (--max_steps is the smaller)\n"),
        (6, "runs to step 6, 1 epoch\n"),
        (7, "runs to step 6, 1 epoch (--num_epochs is the smaller)\n"),
    ],
)
def test_of_two_limits_the_start_names_the_smaller(
    max_steps: int,
    ending: str,
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(here, output_path=tmp_path, num_epochs=1, max_steps=max_steps)
    assert ending in said(capsys)


def test_the_end_says_steps_time_rate_loss_memory_and_the_command_to_try(
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary, "LOSSES_AVERAGED", 2)
    train(here, output_path=tmp_path)
    printed = said(capsys)
    losses = [row["loss"] for row in log(tmp_path)]
    found = re.search(r"(\d+) steps in (\d+:\d\d:\d\d), ([\d.]+) samples/s\n"
                      r".*loss (\S+) \(mean of the last (\d+) steps\)\n"
                      r".*peak memory ([\d.]+) GiB\n", printed)  # fmt: skip
    assert found is not None, printed
    assert (found[1], found[5]) == ("6", "2")
    assert float(found[4]) == pytest.approx(sum(losses[-2:]) / 2, rel=1e-3)
    assert float(found[6]) > 0
    assert printed.index(found[0]) < printed.index(
        f"weights: {tmp_path}/epoch-0.safetensors\n"
    )
    assert f"try them: dstrain generate --run {tmp_path} " in printed


def test_a_run_with_nothing_left_to_do_reports_no_rate(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    said(capsys)
    train(here, output_path=tmp_path, max_steps=1, resume="auto")
    printed = said(capsys)
    assert f"nothing left to do: {tmp_path} is at step 1 of 1\n" in printed
    assert f"weights: {tmp_path}/step-1.safetensors\n" in printed
    assert f"try them: dstrain generate --run {tmp_path} " in printed
    assert "samples/s" not in printed


def test_samples_a_second_are_those_of_all_steps_together() -> None:
    statistics = RunStatistics()
    for rate in (1.0, 4.0):  # as many samples, the second time in a quarter of the time
        statistics.add({"samples_per_second": rate, "loss": 2.0})
    assert statistics.summary(0.5) == (
        "2 steps in 0:00:00, 1.60 samples/s",
        "loss 2 (mean of the last 2 steps)",
        "peak memory 0.50 GiB",
    )
