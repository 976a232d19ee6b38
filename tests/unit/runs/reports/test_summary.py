"""What a run says at its start and at its end."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixtures import FakePlugin
from tests.support.runs import train

pytestmark = pytest.mark.usefixtures("tiny")


def lines_with(text: str, printed: str) -> list[str]:
    return [line for line in printed.splitlines() if text in line]


def test_the_start_says_samples_shapes_batch_and_schedule(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_epochs": 3,
        "seed": 7,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 2,
        "dataset_repeat": 2,
    }
    train(here, output_path=tmp_path, **flags)
    printed = capsys.readouterr().err
    for numbers in (
        "cpu, mixed precision no, 1 process\n",
        "to_q x2, to_out x2\n",
        "6 samples x 2 in 2 shapes, 4 steps",
        " 12, 3 epochs\n",
        "1 process x 2 x 2 accumulated = 4 samples",
        "adamw, learning rate 0.01, constant_with_warmup\n",
        "seed 7\n",
        f" {tmp_path}\n",
    ):
        assert numbers in printed
    assert printed.index("samples x") < printed.index("12 steps in ")


def test_only_numbers_of_plugins_count_steps(
    here: Path,
    tmp_path: Path,
    fake_plugin: FakePlugin,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = """
from dstrain.plugin import option, options
@options
class Own:
    named_steps: str | None = option("data", "Names.")
    counted_steps: int | None = option("data", "Steps.")
"""
    modules = {"own_steps": record}
    fake_plugin("own-steps", {"own": "own_steps:Own"}, modules, "dstrain.options")
    train(here, output_path=tmp_path, max_steps=1, named_steps="a", counted_steps=9)
    printed = capsys.readouterr().err
    assert "--counted_steps 9: the run ends before" in printed
    assert "--named_steps" not in printed


def test_the_end_says_steps_time_rate_loss_memory_and_the_command_to_try(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(here, output_path=tmp_path, dataset_repeat=4, max_steps=22, ema_decay=0.9)
    printed = capsys.readouterr().err
    log = (tmp_path / "logs/loss.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in log]
    (line,) = lines_with(" samples/s", printed)
    steps, rate = re.findall(r"^(\d+) .* \d+:\d\d:\d\d, ([\d.]+)", line)[0]
    assert steps == "22"
    # As many samples in each step, the fast ones in less time.
    seconds = sum(1 / row["samples_per_second"] for row in rows)
    assert float(rate) == pytest.approx(22 / seconds, rel=1e-3)
    (line,) = lines_with("(mean", printed)
    assert " 20 " in line
    losses = [row["loss"] for row in rows]
    mean = float(line.split()[1])
    assert mean == pytest.approx(sum(losses[2:]) / 20, rel=1e-3)
    (memory,) = re.findall(r"memory ([\d.]+) GiB\n", printed)
    assert float(memory) > 0
    assert f"{tmp_path}/step-22.ema.safetensors\n" in printed
    weights = f"weights: {tmp_path}/step-22.safetensors\n"
    trial = f"dstrain generate --run {tmp_path} "
    assert printed.index(line) < printed.index(weights) < printed.index(trial)
