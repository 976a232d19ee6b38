"""The table says what a run needs, whether it fits, and what makes it fit."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.console import get_logger
from dstrain.runs import Setup
from dstrain.runs.memory.advice import Way, added_flags, ways
from dstrain.runs.memory.planning import PlannedRun
from dstrain.runs.memory.report import _advice
from dstrain.runs.offload import check_offloaded

from tests.support.runs import project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command in a folder with a dataset."""
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = "--model tiny --toy --dataset_base_path data --output_path out"
    return [*given.split(), "--max_steps", "2"]


def dry_run(
    capsys: pytest.CaptureFixture[str], words: list[str], memory: str, status: int = 0
) -> str:
    more = ["--dry_run", "--device_memory", memory]
    assert main([*words, *more]) == status
    captured = capsys.readouterr()
    return captured.out if not status else captured.err


def test_each_stage_names_its_own_components(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {}
    for stage in ("", ":data_process", ":train"):
        cache = ["--feature_cache", "cache"] if stage else []
        out = dry_run(capsys, [*words, *cache, "--task", f"sft{stage}"], "24")
        table = out.partition("memory of one device")[2]
        names[stage] = re.findall(r"^    (\w+) +[\d.]+ \wiB", table, re.MULTILINE)
    assert {"dit", "text_encoder", "vae"} <= set(names[""])
    assert names[":data_process"][:2] == ["text_encoder", "vae"]
    assert "gradients" not in names[":data_process"]
    assert names[":train"][:2] == ["dit", "gradients"]


def test_a_run_that_swaps_blocks_is_said_to_checkpoint(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = dry_run(capsys, [*words, "--blocks_to_swap", "1"], "24")
    assert re.search("activations .* with checkpointing\n", out)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left free for what is not counted: toys are smaller than that."""
    monkeypatch.setattr("dstrain.runs.memory.estimate.CONTEXT", 0)
    monkeypatch.setattr("dstrain.runs.memory.estimate.FRAGMENTED", 0)


def peak(out: str) -> float:
    """The bytes of the peak that a dry run says, of two stages the larger one."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    lines = [one.split() for one in out.splitlines() if one.startswith("    peak")]
    return max(float(size) * units[unit] for _, size, unit, *_ in lines)


def advised(out: str) -> list[list[str]]:
    """The commands that a dry run advises."""
    assert "it does not fit on --device_memory" in out
    whole = re.sub(r" \\\n +", " ", out)
    lines = [one for one in whole.splitlines() if one.startswith("        dstrain")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize(
    ("flags", "share", "said"),
    [
        ("--mixed_precision bf16", 0.99, "--use_gradient_checkpointing"),
        ("--mixed_precision bf16", 0.8, "--task --feature_cache --quant_options"),
        ("--mixed_precision no", 0.6, "--mixed_precision --blocks_to_swap"),
        ("--task sft:data_process --feature_cache c", 0.7, "--offload_models"),
        ("--feature_cache c --mixed_precision bf16", 0.95,
         "--quant_options --use_gradient_checkpointing_offload"),
        ("--trainable_models dit --optimizer_args maximize=false --mixed_precision bf16",
         0.4, "--trainable_dtype --optimizer"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("exact")
def test_what_does_not_fit_comes_with_commands_that_fit_and_work(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    flags: str,
    share: float,
    said: str,
) -> None:
    words = [*words, *flags.split()]
    size = f"{share * peak(dry_run(capsys, words, '24')) / 2**20:.6f}MiB"
    commands = advised(dry_run(capsys, words, size))
    assert commands
    assert {*said.split()} <= {word for command in commands for word in command}
    for command in commands:
        assert "it fits on --device_memory" in dry_run(capsys, command, size)
        assert main(command) == 0


def test_advice_leaves_nothing_on_the_terminal_but_itself(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loud(setup: Setup) -> None:
        get_logger("dstrain.runs.trial").warning("said of a trial")
        check_offloaded(setup)

    monkeypatch.setattr("dstrain.runs.memory.planning.check_offloaded", loud)
    assert main([*words, "--dry_run", "--device_memory", "0.001MiB"]) == 0
    captured = capsys.readouterr()
    assert "no flags are known with which it fits" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(("device", "card"), [("16GB", " --card 16GB"), (None, "")])
def test_recipes_for_the_card_are_named_where_one_does_not_fit(
    device: str | None, card: str
) -> None:
    config = TrainConfig(model="flux", recipe="flux-style-48gb", device_memory=device)
    setup = SimpleNamespace(sharding=None, config=config)
    run: Any = SimpleNamespace(setup=setup, cheapest=lambda size: None)
    assert [*_advice(run, 1)] == [
        "    no flags are known with which it fits",
        f"    recipes that may: dstrain recipes --model flux{card}",
    ]


def test_bf16_weights_can_be_planned_for_another_device(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, "--trainable_models", "dit", "--trainable_dtype", "bf16"]
    out = dry_run(capsys, words, "24")
    assert re.search(r"trained weights .* in bf16\n +gradients .* bf16\n", out)
    assert main([*words, "--dry_run"]) == 2


def test_without_a_gpu_it_says_how_to_plan_for_one(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*words, "--dry_run"]) == 0
    assert "--device_memory 24GB says whether it fits" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--ema_decay", ".9"]])
def test_disk_is_what_the_run_leaves(
    words: list[str], capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    words = [*words, *flags, "--save_steps", "1"]
    out = dry_run(capsys, words, "24")
    assert re.search(r"weights files +[\d.]+ KiB  x 2 saves", out)
    assert re.search(r"training states +[\d.]+ KiB  x 2, one of them", out)
    said = re.search(r"in all +([\d.]+) KiB  at most", out)
    assert said is not None
    assert main(words) == 0
    # Beside the headers of files, which count at the size of the toy.
    written = sum(one.stat().st_size for one in Path("out").rglob("*.safetensors"))
    assert 0.5 < float(said[1]) * 2**10 / written < 1


def test_sharding_divides_what_is_trained_and_is_advised_nothing_that_it_refuses(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bytes_of(out: str, name: str) -> float:
        found = re.search(rf"^    {name} +([\d.]+) KiB", out, re.MULTILINE)
        assert found, out
        return float(found[1])

    def tried(run: PlannedRun, size: int) -> None:
        found = ways(run.setup.config, run.possible)
        advised.extend(added_flags(way.changes) for way in found)

    advised: list[str] = []
    monkeypatch.setattr(PlannedRun, "cheapest", tried)
    words = [*words, "--lora_rank", "4"]
    alone = dry_run(capsys, words, "24")
    dry_run(capsys, words, "0.001")
    refused = ("--blocks_to_swap", "--optimizer")
    assert all(flag in " ".join(advised) for flag in refused)
    advised.clear()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    divided = dry_run(capsys, words, "24")
    for name in ("trained weights", "gradients", "optimizer state"):
        assert bytes_of(divided, name) == pytest.approx(bytes_of(alone, name) / 2, 0.1)
    assert "all else is divided by 2" in " ".join(divided.split())
    for name in ("weights files", "training states"):  # whole
        assert bytes_of(divided, name) == bytes_of(alone, name)
    assert "start more processes" in dry_run(capsys, words, "0.001")
    assert advised and not any(flag in " ".join(advised) for flag in refused)
    monkeypatch.setattr(PlannedRun, "cheapest", first_way)
    way = "add --use_gradient_checkpointing, behind the same launcher"
    assert way in dry_run(capsys, words, "0.001")
    monkeypatch.setenv("RANK", "1")
    assert dry_run(capsys, words, "24") == ""


def first_way(run: PlannedRun, size: int) -> Way:
    return next(ways(run.setup.config, run.possible))


def test_advised_commands_have_files_that_are_not_here(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlannedRun, "cheapest", first_way)
    preset = ["--preset_lora_path", "absent.safetensors", "--preset_lora_model", "dit"]
    out = dry_run(capsys, [*words, *preset], "0.001")
    (command,) = advised(out)
    assert "--use_gradient_checkpointing" in command
    place = command.index("--preset_lora_path")
    assert command[place + 1] == "absent.safetensors"


def test_the_size_goes_with_a_dry_run(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--device_memory", "24GB"]) == 2
    said = "--device_memory: has no effect without --dry_run"
    assert said in capsys.readouterr().err
    said = "--device_memory: expected a size such as 24GB, 24GiB or 24, got 'big'"
    assert said in dry_run(capsys, words, "big", status=2)
