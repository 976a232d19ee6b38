"""Where a run does not fit, commands are advised that fit and work, the cheapest first."""

import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.cli.main import main
from dstrain.config import command_line

from tests.support import family
from tests.support.runs import config, train

pytestmark = pytest.mark.usefixtures("tiny")
DryRun = Callable[..., Any]
CHECKPOINTS = "--use_gradient_checkpointing"
IN_RAM = "--use_gradient_checkpointing - --use_gradient_checkpointing_offload"
STAGE_1 = {"task": "sft:data_process", "feature_cache": Path("cache")}
SPLIT = "--task sft:train --feature_cache out-features"
ORDERS: Mapping[str, tuple[dict[str, Any], list[tuple[float, str]]]] = {
    "LoRA": (
        {"batch_size": 4, "gradient_accumulation_steps": 2},
        [
            (0.99, CHECKPOINTS),
            (0.95, SPLIT),
            (
                0.79,
                "--mixed_precision bf16 --batch_size - --gradient_accumulation_steps 8"
                " --quant_options dit:int8_block",
            ),
            (0.35, f"{IN_RAM} --quant_options dit:bitsandbytes_nf4 --blocks_to_swap 4"),
            (0.31, "--optimizer adamw8bit --trainable_dtype bf16"),
            (0.27, ""),
        ],
    ),
    "full training": (
        {
            "trainable_models": "dit",
            "mixed_precision": "bf16",
            "optimizer_args": ("maximize=false", "eps=1e-6"),
        },
        [
            (0.91, f"{SPLIT} --use_gradient_checkpointing_offload"),
            (0.87, "--optimizer adamw8bit --optimizer_args eps=1e-6"),
            (0.59, "--trainable_dtype bf16"),
            (0.35, ""),
        ],
    ),
    "stage 1": (
        STAGE_1,
        [
            (0.99, "--mixed_precision bf16 --offload_models text_encoder,vae"),
            (0.75, "--quant_options text_encoder:int8_block"),
            (0.63, "--quant_options text_encoder:bitsandbytes_nf4"),
            (0.59, ""),
        ],
    ),
    "both stages": (
        {"feature_cache": Path("cache")},
        [
            (
                0.95,
                f"{CHECKPOINTS} --mixed_precision bf16 --quant_options dit:int8_block",
            ),
            (0.67, IN_RAM),
            (
                0.39,
                "--quant_options dit:bitsandbytes_nf4 --blocks_to_swap 4"
                " --optimizer adamw8bit --offload_models text_encoder,vae",
            ),
        ],
    ),
}
"""Flags, and how much of the memory that they need there is -> what else is changed; '-'
stands for a flag that goes."""


def commands_in(page: str) -> list[list[str]]:
    """The words of the commands that are advised."""
    whole = re.sub(r" \\\n +", " ", page)
    lines = [one for one in whole.splitlines() if one.startswith("        dstrain")]
    return [shlex.split(line)[1:] for line in lines]


def flags_in(words: list[str]) -> dict[str, str]:
    """The flags of a command with their values."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
        found[name] = "" if word.startswith("--") else f"{found[name]} {word}".strip()
    return found


def typed(folder: Path, **flags: Any) -> dict[str, Any]:
    """The flags of a command line with their values."""
    return flags_in(shlex.split(command_line(config(folder, **flags)))[1:])


def memory_of(share: float, sums: list[float]) -> str:
    """A device that has a share of what the larger of these stages needs."""
    return f"{(2**30 + 1.05 * share * max(sums)) / 2**20:.6f}MiB"


@pytest.mark.parametrize("name", ORDERS)
def test_the_cheapest_flags_come_first_and_their_commands_fit_and_work(
    name: str,
    deep: Path,
    empty: Path,
    dry_run: DryRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given, order = ORDERS[name]
    flags = {"mixed_precision": "no", "output_path": Path("out"), "max_steps": 1}
    flags |= given
    wanted = typed(deep, **flags)
    sums = dry_run(deep, **flags).sums
    for share, changes in order:
        size = memory_of(share, sums)
        commands = commands_in(dry_run(deep, device_memory=size, **flags).page)
        if not changes:
            assert commands == []
            break
        wanted |= flags_in(changes.split())
        wanted = {name: value for name, value in wanted.items() if value != "-"}
        assert flags_in(commands[-1]) == wanted
        if len(commands) > 1:
            first = flags_in(commands[0])
            assert first["task"] == "sft:data_process"
            assert first["mixed_precision"] == wanted["mixed_precision"]
            assert first["feature_cache"] == wanted["feature_cache"]
        for command in commands:
            assert main([*command, "--dry_run", "--device_memory", size]) == 0
            captured = capsys.readouterr()
            assert "    it fits on --device_memory" in captured.out
            assert captured.err == ""
            assert main(command) == 0
            capsys.readouterr()
        for folder in empty.iterdir():
            shutil.rmtree(folder)


def test_layers_that_scale_others_stay_in_8_bits_and_every_block_is_swapped(
    deep: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    dit, *others = family.COMPONENTS
    scaling = (replace(dit, modulation=("time",)), *others)
    monkeypatch.setattr(family, "COMPONENTS", scaling)
    flags = {"mixed_precision": "bf16", "quant_options": "text_encoder:fp8"}
    flags |= {"output_path": deep / "out"}
    size = memory_of(0.35, dry_run(deep, **flags).sums)
    first, second = commands_in(dry_run(deep, device_memory=size, **flags).page)
    assert flags_in(first)["quant_options"] == "text_encoder:fp8"
    entries = "dit:bitsandbytes_nf4/time;dit:int8_block@time"
    found = flags_in(second)
    assert found["quant_options"] == f"text_encoder:fp8;{entries}"
    assert found["blocks_to_swap"] == "4"


@pytest.mark.parametrize(
    ("flags", "share", "wanted"),
    [
        (
            {"quant_options": "text_encoder:fp8"},
            0.75,
            {"quant_options": "text_encoder:fp8;dit:int8_block"},
        ),
        ({"optimizer": "adafactor"}, 0.25, {"optimizer": "adafactor"}),
        ({"resume": "auto"}, 0.5, {"quant_options": "dit:int8_block"}),
        ({"offload_models": "vae", **STAGE_1}, 0.9, {"offload_models": "vae"}),
    ],
)
def test_what_was_chosen_stays_and_the_rest_is_advised(
    flags: dict[str, Any],
    share: float,
    wanted: dict[str, str],
    deep: Path,
    tmp_path: Path,
    dry_run: DryRun,
) -> None:
    flags = {"mixed_precision": "no", "output_path": tmp_path / "out", **flags}
    size = memory_of(share, dry_run(deep, **flags).sums)
    page = dry_run(deep, device_memory=size, **flags).page
    found = flags_in(commands_in(page)[-1])
    assert wanted.items() <= found.items()
    assert found["mixed_precision"] == "bf16"
    # Cached values depend on it.
    is_stage_1 = "task" in flags
    assert ("stage 2 needs --mixed_precision bf16" in page) is is_stage_1


@pytest.mark.parametrize("is_split", [False, True])
def test_a_run_that_resumes_keeps_what_its_numbers_depend_on(
    is_split: bool, deep: Path, tmp_path: Path, dry_run: DryRun
) -> None:
    flags: dict[str, Any] = {"output_path": tmp_path / "out", "mixed_precision": "no"}
    if is_split:
        flags["feature_cache"] = tmp_path / "cache"
    train(deep, max_steps=1, **flags)
    flags |= {"max_steps": 2, "resume": "auto", "batch_size": 1}
    moved = {"blocks_to_swap", *flags_in(IN_RAM.split())}
    moved |= {"offload_models"} if is_split else set()
    sums = dry_run(deep, **flags).sums
    seen: set[str] = set()
    for share in (0.99, 0.9, 0.8, 0.7, 0.6):
        size = memory_of(share, sums)
        for command in commands_in(dry_run(deep, device_memory=size, **flags).page):
            seen |= flags_in(command).keys() - typed(deep, **flags).keys()
    assert seen <= moved
    assert "blocks_to_swap" in seen


def test_sharding_is_advised_nothing_that_it_refuses(
    deep: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sums = dry_run(deep).sums
    pages = [
        dry_run(deep, device_memory=memory_of(share, sums)).page
        for share in (0.99, 0.8, 0.5, 0.01)
    ]
    answers = [page.partition("\nwhether it fits")[2] for page in pages]
    # The launcher and its file are not among the flags of a command.
    assert [commands_in(page) for page in pages] == [[]] * 4
    assert "\n        add --use_gradient_checkpointing, " in answers[0]
    assert re.findall(r"sft:(\w+)", answers[1]) == ["data_process", "train"]
    assert "processes" in answers[-1]
    for flag in ("--blocks_to_swap", "--optimizer", "--trainable_dtype"):
        assert not any(flag in answer for answer in answers)


def test_advised_commands_have_files_that_are_not_here(
    deep: Path, tmp_path: Path, dry_run: DryRun
) -> None:
    absent = tmp_path / "absent.safetensors"
    flags = {"preset_lora_path": str(absent), "preset_lora_model": "dit"}
    flags |= {"output_path": tmp_path / "out"}
    sums = dry_run(deep, **flags).sums
    page = dry_run(deep, device_memory=memory_of(0.99, sums), **flags).page
    commands = commands_in(page)
    assert commands
    assert all(flags_in(one)["preset_lora_path"] == str(absent) for one in commands)


def test_a_run_is_planned_for_a_gpu(here: Path, dry_run: DryRun) -> None:
    # Planned for a GPU, weights are in bf16.
    assert "parameters in bf16" in dry_run(here, mixed_precision=None).page
    # Without a GPU, it says how to plan for one.
    page = dry_run(here, device_memory=None).page
    assert ("--device_memory" in page) is not torch.cuda.is_available()
