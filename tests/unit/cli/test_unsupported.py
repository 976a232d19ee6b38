"""Flags of other trainers are refused with what to use instead."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain.cli.unsupported import advice, no_such, unused_variables
from dstrain.config.fields import flags
from dstrain.config.options.generate import GenerateConfig
from dstrain.config.options.train import TrainConfig

from tests.support.command_lines import BASE

Install = Callable[..., Path]
Source = Callable[..., str]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--network_dim", "use --lora_rank"),
        ("--max_train_steps", "use --max_steps"),
        (
            "--enable_optimizer_cpu_offload",
            "use --optimizer paged_adamw8bit: its state is a quarter, and moves to RAM where the GPU is full",
        ),
        (
            "--dmd2_guidance_lora_rank",
            "this distillation is not supported; use --task direct_distill",
        ),
        ("--resume_from", "use --resume PATH, which resumes where a run stopped"),
        (
            "--dataset_config",
            "use --config FILE with a table [[dataset]] for each: docs/guide/captions-and-buckets.md",
        ),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_flag_of_another_trainer_gets_advice(
    flag: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, flag, "3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"dstrain: error: {flag}: no such option",
        f"  {line}",
    ]


def test_no_advice_is_for_a_flag_that_exists_or_names_one_that_does_not() -> None:
    known = {
        flag.name for config in (TrainConfig, GenerateConfig) for flag in flags(config)
    } | {"config", "debug"}
    others = [name for names in advice().values() for name in names]
    assert len(others) == len(set(others)) and not known & set(others)
    text = " ".join(advice())
    assert set(re.findall(r"--(\w+)", text)) <= known | {"config_file"}


def test_advice_is_for_the_flag_itself_however_it_is_written() -> None:
    for written in ("rank", "network_dim", "--network-dim"):
        advice = ("no such option", "use --lora_rank")
        assert no_such(written, ["--lora_rank"]) == advice
        # `dstrain generate` has no such option.
        assert no_such(written, ["--lora"]) == ("no such option",)
    assert no_such("ran", []) == ("no such option",)
    assert no_such("--lora_rnak", ["--lora_rank"]) == (
        "no such option; did you mean '--lora_rank'?",
    )


def test_a_variable_without_effect_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unused_variables() == []
    monkeypatch.setenv("DIFFSYNTH_ATTENTION_IMPLEMENTATION", "sage_attention")
    (line,) = unused_variables()
    assert line.startswith("variable DIFFSYNTH_ATTENTION_IMPLEMENTATION has no effect")
