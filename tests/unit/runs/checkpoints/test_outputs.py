"""What a training run writes: names, contents, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.cli.main import main
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.state import load_state
from dstrain.storage import CHECKSUM, read_tensors
from safetensors import safe_open

from tests.support.runs import config, files, log, outcome, same, train, training_run


def names(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if not path.name.startswith(".")
    )


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("flags", "saved", "kept"),
    [
        ({"num_epochs": 3}, ["epoch-0", "epoch-1", "epoch-2"], [12, 18]),
        ({"num_epochs": 1, "save_steps": 4}, ["step-4", "step-6"], [4, 6]),
        ({"num_epochs": 1, "save_steps": 2}, ["step-2", "step-4", "step-6"], [4, 6]),
        ({"num_epochs": 1, "save_steps": 100}, ["step-6"], [6]),
        ({"max_steps": 8}, ["epoch-0", "step-8"], [6, 8]),
        ({"max_steps": 2, "dataset_repeat": 5}, ["step-2"], [2]),
        (
            {"num_epochs": 1, "batch_size": 2, "gradient_accumulation_steps": 3},
            ["epoch-0"],
            [2],
        ),
    ],
)
def test_weights_are_named_by_epoch_or_step_and_the_last_step_is_always_saved(
    flags: dict[str, Any], saved: list[str], kept: list[int], here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, **flags)
    weights = [f"{name}.safetensors" for name in saved]
    assert names(tmp_path) == sorted(["logs", "run.json", "states", *weights])
    assert names(tmp_path / "states") == sorted(f"step-{step}" for step in kept)
    assert load_state(states(tmp_path)[0]).step == kept[-1]


def test_each_trainable_has_a_file_of_its_own(here: Path, tmp_path: Path) -> None:
    flags = {"trainable_models": "text_encoder", "lora_base_model": "dit"}
    train(here, output_path=tmp_path, lora_alpha=6.0, **flags)
    made = files(tmp_path)
    assert set(made) == {"epoch-0.dit.safetensors", "epoch-0.text_encoder.safetensors"}
    lora = made["epoch-0.dit.safetensors"]
    assert all(name.startswith("transformer.blocks.") for name in lora)
    _, header = read_tensors(tmp_path / "epoch-0.dit.safetensors")
    wanted = {"family": "tiny", "variant": "base", "component": "dit", "step": "6"}
    wanted |= {"task": "sft", "rank": "2", "alpha": "6.0"}
    wanted["version.torch"] = torch.__version__
    assert wanted.items() <= header.items()
    adapter = json.loads(header["lora_adapter_metadata"])
    assert (adapter["transformer.r"], adapter["transformer.lora_alpha"]) == (2, 2)
    whole = training_run(config(here, trainable_models="text_encoder"))
    network = whole.module.pipeline.components["text_encoder"]
    encoder, header = read_tensors(tmp_path / "epoch-0.text_encoder.safetensors")
    assert encoder.keys() == network.state_dict().keys()
    assert json.loads(header["config"]) == {"width": 8}
    assert header["format"] == "pt" and len(header[CHECKSUM]) == 64


@pytest.mark.parametrize(
    "flags", [{"overwrite": True}, {"resume": "auto"}], ids=["overwrite", "resume"]
)
def test_a_written_configuration_repeats_the_run_and_neither_removes_nor_resumes_it(
    flags: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    for step, start in ((1, {}), (2, flags)):
        train(here, output_path=tmp_path / "out", max_steps=step, **start)
    before = contents(tmp_path / "out")
    printed = ["--config", str(tmp_path / "out/logs/config.json")]
    assert main([*printed, "--learning_rate", "1e-3"]) == 3
    assert before == contents(tmp_path / "out")
    assert main([*printed, "--output_path", str(tmp_path / "again")]) == 0
    assert log(tmp_path / "again") == log(tmp_path / "out")


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"save_steps": 2, "ema_decay": 0.5},
        {"trainable_models": "dit,text_encoder", "keep_checkpoints": 1},
    ],
    ids=["by epochs", "by steps, with an average", "two components"],
)
def test_a_complete_run_writes_weights_that_are_gone_again_from_its_state(
    flags: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, **flags)
    before = outcome(tmp_path)
    *_, last = sorted(tmp_path.glob("*.safetensors"))
    last.unlink()
    train(here, output_path=tmp_path, resume="auto", **flags)
    assert same(outcome(tmp_path), before)
    written = last.stat().st_mtime_ns
    train(here, output_path=tmp_path, resume="auto", **flags)
    assert last.stat().st_mtime_ns == written


def test_what_a_header_records_and_the_digest_of_the_options_do_not_change(
    here: Path, tmp_path: Path
) -> None:
    """Another digest would refuse to resume every run that was saved before."""
    flags = {"mixed_precision": "no", "lr_scheduler": "cosine", "max_steps": 4}
    out = train(here, output_path=tmp_path, data_file_keys="image", **flags)
    _, header = read_tensors(out / "step-4.safetensors")
    assert header["recipe"] == (
        '{"batch_size": 1, "dataset_repeat": 1, "frame_samples": null, "frame_sampling": "head", '
        '"gradient_accumulation_steps": 1, "height": null, "learning_rate": 0.01, "loss_weighting": "bsmntw", '
        '"lr_scheduler": "cosine", "lr_warmup_steps": 0, "max_grad_norm": 1.0, "max_pixels": 1048576, '
        '"max_timestep_boundary": null, "min_timestep_boundary": null, "model": "tiny", "num_frames": 81, '
        '"seed": 0, "steps": 4, "task": "sft", "timestep_sampling": "shifted", "weight_decay": 0.01, "width": null}'
    )
    digest = load_state(out / "states/step-4").config_digest
    assert digest == "f5bec383d329fda39defbea5391ce7dc4e3ee312"


@pytest.mark.parametrize("trained", [{}, {"trainable_models": "dit"}])
def test_the_average_over_the_steps_is_saved_beside_weights_that_are_the_same_without_it(
    trained: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    flags = {"max_steps": 3, "save_steps": 1, "keep_checkpoints": 2, **trained}
    train(here, output_path=tmp_path / "plain", **flags)
    train(here, output_path=tmp_path / "averaged", ema_decay=0.15, **flags)
    plain, made = files(tmp_path / "plain"), files(tmp_path / "averaged")
    for name in ("step-2.safetensors", "step-3.safetensors"):
        one, other = (tmp_path / way / name for way in ("plain", "averaged"))
        assert one.read_bytes() == other.read_bytes()
        # Pruned together with it.
        assert made.pop(name.replace(".", ".ema.")).keys() == plain[name].keys()
    assert same(made, plain)
    assert log(tmp_path / "plain") == log(tmp_path / "averaged")


def test_the_average_is_that_of_the_weights_of_every_step(
    here: Path, tmp_path: Path
) -> None:
    flags = {"trainable_models": "dit", "max_steps": 4, "save_steps": 1}
    start = training_run(config(here, **flags)).module.pipeline.components["dit"]
    expected = {name: value.clone() for name, value in start.state_dict().items()}
    train(here, output_path=tmp_path, ema_decay=0.15, **flags)
    made = files(tmp_path)
    for step in range(4):
        decay = min(0.15, (1 + step) / (10 + step))
        weights = made[f"step-{step + 1}.safetensors"]
        averages = made[f"step-{step + 1}.ema.safetensors"]
        for name in expected:
            expected[name] = decay * expected[name] + (1 - decay) * weights[name]
            torch.testing.assert_close(averages[name], expected[name])
        assert not same(averages, weights)
    with safe_open(tmp_path / "step-4.ema.safetensors", "pt") as file:
        assert file.metadata()["ema_decay"] == "0.15"
    with safe_open(tmp_path / "step-4.safetensors", "pt") as file:
        assert "ema_decay" not in file.metadata()
