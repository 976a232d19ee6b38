"""Where a run does not fit, commands are advised that fit and work, the cheapest first."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.cli.main import main

from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")
DryRun = Callable[..., Any]


def memory_of(share: float, sums: list[float]) -> str:
    """A device that has a share of what the larger of these stages needs."""
    return f"{(2**30 + 1.05 * share * max(sums)) / 2**20:.6f}MiB"


def commands_in(page: str) -> list[list[str]]:
    """The words of the commands that are advised."""
    whole = re.sub(r" \\\n +", " ", page)
    lines = [one for one in whole.splitlines() if one.startswith("        dstrain")]
    return [shlex.split(line)[1:] for line in lines]


def flags_in(words: list[str]) -> dict[str, str]:
    """The flags of a command with their values, '' for those without."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            found[name] = ""
        else:
            found[name] = word
    return found


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command in a folder with a dataset."""
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = "--model tiny --toy --dataset_base_path data --output_path out"
    return [*given.split(), "--max_steps", "2"]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function from words and a device to what a dry run says; nothing of what
    is tried reaches the terminal.
    """

    def page(words: list[str], memory: str, code: int = 0) -> str:
        assert main([*words, "--dry_run", "--device_memory", memory]) == code
        captured = capsys.readouterr()
        assert not (captured.out if code else captured.err)
        return captured.err if code else captured.out

    return page


@pytest.mark.parametrize(
    ("flags", "share", "advised"),
    [
        ("--mixed_precision bf16", 0.99, "--use_gradient_checkpointing"),
        ("--mixed_precision bf16", 0.8, "--task --feature_cache --quant_options"),
        ("--mixed_precision no", 0.6, "--mixed_precision --blocks_to_swap"),
        ("--task sft:data_process --feature_cache c", 0.7, "--offload_models"),
        (
            "--feature_cache c --mixed_precision bf16",
            0.95,
            "--quant_options --use_gradient_checkpointing_offload",
        ),
        (
            "--trainable_models dit --optimizer_args maximize=false --mixed_precision bf16",
            0.4,
            "--trainable_dtype --optimizer",
        ),
    ],
)
def test_what_does_not_fit_comes_with_commands_that_fit_and_work(
    typed: list[str],
    said: Callable[..., str],
    flags: str,
    share: float,
    advised: str,
) -> None:
    words = [*typed, *flags.split()]
    tables = said(words, "24").partition("memory of one device")[2]
    stages = tables.partition("\ndisk")[0].split("memory of one device")
    sums = []
    for stage in stages:
        counted = stage.partition("    not counted")[0]
        sums.append(sum(1024 * float(one) for one in re.findall(r"([\d.]+) KiB", counted)))
    size = memory_of(share, sums)
    commands = commands_in(said(words, size))
    assert commands
    assert {*advised.split()} <= {word for command in commands for word in command}
    for command in commands:
        assert "--dry_run" not in command and "--device_memory" not in command
        assert "    it fits on --device_memory" in said(command, size)
        assert main(command) == 0
