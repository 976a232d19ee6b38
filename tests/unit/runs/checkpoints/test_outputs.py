"""What a training run writes: names, contents, and what is refused."""

import json
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain import DstrainError, StateError, UsageError
from dstrain.cli.main import main
from dstrain.config import as_flags
from dstrain.runs.checkpoints.state import load_state, states
from dstrain.runs.reports.metrics import COLUMNS
from dstrain.storage import CHECKSUM, lock, read_tensors, write_tensors
from safetensors import safe_open

from tests.support.runs import (
    PowerCut,
    config,
    files,
    log,
    outcome,
    project,
    same,
    stop_at,
    train,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def names(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if not path.name.startswith(".")
    )


RUN_FILES = ["logs", "run.json", "states"]


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
    weights = sorted(f"{name}.safetensors" for name in saved)
    assert names(tmp_path) == sorted([*RUN_FILES, *weights])
    assert names(tmp_path / "states") == sorted(f"step-{step}" for step in kept)
    assert load_state(states(tmp_path)[0]).step == kept[-1]


def test_each_of_several_trainables_has_a_file_of_its_own(
    here: Path, tmp_path: Path
) -> None:
    train(
        here,
        output_path=tmp_path,
        trainable_models="text_encoder",
        lora_base_model="dit",
        lora_alpha=6.0,
    )
    made = files(tmp_path)
    assert set(made) == {"epoch-0.dit.safetensors", "epoch-0.text_encoder.safetensors"}
    assert all(
        name.startswith("transformer.blocks.")
        for name in made["epoch-0.dit.safetensors"]
    )
    whole = (
        training_run(config(here, trainable_models="text_encoder"))
        .module.pipeline.components["text_encoder"]
        .state_dict()
    )
    assert made["epoch-0.text_encoder.safetensors"].keys() == whole.keys()
    with safe_open(tmp_path / "epoch-0.dit.safetensors", "pt") as file:
        header = file.metadata()
    printed = {
        name: header[name]
        for name in ("family", "variant", "component", "step", "task", "rank", "alpha")
    }
    assert list(printed.values()) == ["tiny", "base", "dit", "6", "sft", "2", "6.0"]
    assert header["version.torch"] == torch.__version__
    adapter = json.loads(header["lora_adapter_metadata"])
    assert (adapter["transformer.r"], adapter["transformer.lora_alpha"]) == (2, 2)


def test_the_trackers_columns_are_there_for_every_step(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, num_epochs=2, batch_size=2)
    header, *rows = (tmp_path / "logs/loss.csv").read_text().splitlines()
    assert tuple(header.split(",")) == COLUMNS
    assert [row.split(",")[:2] for row in rows] == [
        [str(step + 1), str(step // 4)] for step in range(8)
    ]
    assert all(
        len(row.split(",")) == len(COLUMNS) and float(row.split(",")[5]) > 0
        for row in rows
    )


def test_the_configuration_is_written_as_it_was_given(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=1, seed=9)
    printed = json.loads((tmp_path / "logs/config.json").read_text())
    assert printed.pop("versions")["torch"] == torch.__version__
    wanted = as_flags(config(here, output_path=tmp_path, max_steps=1, seed=9))
    assert printed == {
        name: value
        for name, value in wanted.items()
        if name not in ("overwrite", "resume", "dry_run", "device_memory")
    }


@pytest.mark.parametrize(
    "flags", [{"overwrite": True}, {"resume": "auto"}], ids=["overwrite", "resume"]
)
def test_a_written_configuration_repeats_the_run_and_neither_removes_nor_resumes_it(
    flags: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    for step, start in ((1, {}), (2, flags)):
        train(here, output_path=tmp_path / "out", max_steps=step, **start)
    before = {
        path: path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    printed = ["--config", str(tmp_path / "out/logs/config.json")]
    assert main([*printed, "--learning_rate", "1e-3"]) == 3
    assert before == {
        path: path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert main([*printed, "--output_path", str(tmp_path / "again")]) == 0
    assert log(tmp_path / "again") == log(tmp_path / "out")


def test_the_start_says_what_will_happen_and_the_end_where_the_weights_are(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        here,
        output_path=tmp_path,
        lora_target_modules="text,to_q",
        num_epochs=2,
        batch_size=2,
    )
    printed = capsys.readouterr().err
    for words in (
        "device cpu, mixed precision no, 1 process",
        "training dit: 96 parameters, ",
        "LoRA on dit: text x2, to_q x2",
        "not trained: 2 tensors, which by the model's design cannot change the loss",
        "6 samples x 1 in 2 shapes, 4 steps per epoch",
        "runs to step 8",
        f"weights: {tmp_path}/epoch-1.safetensors",
        f"try them: dstrain generate --run {tmp_path} --prompt dog --output image.png",
    ):
        assert words in printed, words
    train(
        here,
        output_path=tmp_path,
        lora_target_modules="text,to_q",
        num_epochs=2,
        batch_size=2,
        resume="auto",
    )
    assert (
        f"nothing left to do: {tmp_path} is at step 8 of 8" in capsys.readouterr().err
    )


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
    flags: dict[str, Any],
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(here, output_path=tmp_path, **flags)
    before = outcome(tmp_path)
    *_, last = sorted(tmp_path.glob("*.safetensors"))
    last.unlink()
    train(here, output_path=tmp_path, resume="auto", **flags)
    assert "the weights of step 6 were gone: written again" in capsys.readouterr().err
    assert same(outcome(tmp_path), before)
    train(here, output_path=tmp_path, resume="auto", **flags)
    assert "written again" not in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_refused_without_resume_and_left_alone(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=2)
    before = {
        path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    with pytest.raises(
        StateError,
        match=r"already contains a run: states/step-2\n",
    ) as caught:
        train(here, output_path=tmp_path, max_steps=2)
    assert all(
        flag in caught.value.help_lines[0]
        for flag in ("--resume", "--overwrite", "--output_path")
    )
    # What a script has in their place.
    note = "in a script: resume='auto', overwrite=True, output_path=..."
    assert caught.value.__notes__ == [note]
    assert before == {
        path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }


def test_a_folder_in_use_is_refused_naming_the_process(
    here: Path, tmp_path: Path
) -> None:
    with lock(tmp_path), pytest.raises(StateError, match=str(os.getpid())):
        train(here, output_path=tmp_path, max_steps=1)


@pytest.mark.parametrize(
    "torn", ["", "7", "2,0,0.5", "7,1,0.5,0.01,0.1,10,0.1,0", "\n"]
)
def test_a_log_cut_off_anywhere_continues_without_gaps_or_doubles(
    torn: str, here: Path, tmp_path: Path
) -> None:
    flags = {"max_steps": 10, "save_steps": 4}
    train(here, output_path=tmp_path / "whole", **flags)
    with pytest.raises(PowerCut):
        train(here, stop_at(6), output_path=tmp_path / "cut", **flags)
    path = tmp_path / "cut/logs/loss.csv"
    path.write_text(path.read_text() + torn)
    train(here, output_path=tmp_path / "cut", resume="auto", **flags)
    assert same(log(tmp_path / "whole"), log(tmp_path / "cut"))


def test_a_log_that_is_gone_or_was_cut_off_at_its_start_begins_again(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=2)
    for steps, content in ((3, ""), (4, "step,epo")):
        (tmp_path / "logs/loss.csv").write_text(content)
        train(here, output_path=tmp_path, max_steps=steps, resume="auto")
        assert [row["step"] for row in log(tmp_path)] == [steps]


PREFIX = MappingProxyType({"remove_prefix_in_ckpt": "pipe.dit."})


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ({}, "transformer.blocks.0."),
        (PREFIX, "blocks.0."),
        ({"remove_prefix_in_ckpt": "anything"}, "blocks.0."),
        ({"lora_format": "diffsynth"}, "blocks.0."),
        ({"lora_format": "reference"}, "blocks.0."),
        ({"lora_format": "comfyui"}, "diffusion_model.blocks.0."),
        ({**PREFIX, "lora_format": "diffusers"}, "transformer.blocks.0."),
        ({**PREFIX, "lora_format": "comfyui"}, "diffusion_model.blocks.0."),
    ],
)
def test_a_prefix_to_remove_or_a_format_decides_the_saved_names(
    flags: dict[str, Any], first: str, here: Path, tmp_path: Path
) -> None:
    """The names of the weights in full are the same in all of them for this family."""
    train(here, output_path=tmp_path / "lora", max_steps=1, **flags)
    assert min(files(tmp_path / "lora")["step-1.safetensors"]).startswith(first)
    full = train(
        here,
        output_path=tmp_path / "full",
        trainable_models="dit",
        max_steps=1,
        **flags,
    )
    assert "blocks.0.to_q.weight" in files(full)["step-1.safetensors"]


@pytest.mark.parametrize("trained", ["lora_base_model", "trainable_models"])
def test_a_program_without_names_for_what_is_trained_is_refused(
    trained: str, here: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {trained: "text_encoder", "lora_format": "comfyui"}
    with pytest.raises(
        UsageError,
        match=r"--lora_format: comfyui has no key names for .* text_encoder\n  programs",
    ):
        train(here, output_path=tmp_path, max_steps=1, **flags)
    assert names(tmp_path) == []


def test_a_lora_of_another_component_does_not_start_a_run(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path / "one", max_steps=1)
    tensors, header = read_tensors(tmp_path / "one/step-1.safetensors")
    other = {name: value for name, value in header.items() if name != CHECKSUM} | {
        "component": "dit2"
    }
    write_tensors(tmp_path / "other.safetensors", tensors, other)
    with pytest.raises(StateError, match="is a LoRA for dit2, not for dit"):
        train(
            here,
            output_path=tmp_path / "two",
            max_steps=1,
            lora_checkpoint=tmp_path / "other.safetensors",
        )


def test_an_output_that_cannot_be_written_is_named_before_any_model_is_opened(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DstrainError, match="file") as caught:
        train(
            here,
            output_path=tmp_path / "file/out",
            model_paths='["nothing.safetensors"]',
        )
    assert caught.value.exit_code == 4


def test_what_a_header_records_of_the_options_does_not_change(
    here: Path, tmp_path: Path
) -> None:
    out = train(
        here,
        output_path=tmp_path,
        mixed_precision="no",
        lr_scheduler="cosine",
        max_steps=4,
        data_file_keys="image",
    )
    _, header = read_tensors(out / "step-4.safetensors")
    assert header["recipe"] == (
        '{"batch_size": 1, "dataset_repeat": 1, "frame_samples": null, "frame_sampling": "head", '
        '"gradient_accumulation_steps": 1, "height": null, "learning_rate": 0.01, "loss_weighting": "bsmntw", '
        '"lr_scheduler": "cosine", "lr_warmup_steps": 0, "max_grad_norm": 1.0, "max_pixels": 1048576, '
        '"max_timestep_boundary": null, "min_timestep_boundary": null, "model": "tiny", "num_frames": 81, '
        '"seed": 0, "steps": 4, "task": "sft", "timestep_sampling": "shifted", "weight_decay": 0.01, "width": null}'
    )


def test_a_folder_in_use_says_so_before_it_names_what_it_contains(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    with lock(tmp_path), pytest.raises(StateError, match="is in use by process"):
        train(here, output_path=tmp_path, max_steps=1)


@pytest.mark.parametrize(
    "trained", [{}, {"trainable_models": "dit"}, {"lora_format": "diffsynth"}]
)
def test_the_average_over_the_steps_is_saved_beside_weights_that_are_the_same_without_it(
    trained: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    flags = {"max_steps": 3, "save_steps": 1, "keep_checkpoints": 2, **trained}
    train(here, output_path=tmp_path / "plain", **flags)
    train(here, output_path=tmp_path / "averaged", ema_decay=0.15, **flags)
    plain, made = files(tmp_path / "plain"), files(tmp_path / "averaged")
    for name in ("step-2.safetensors", "step-3.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (
            tmp_path / "averaged" / name
        ).read_bytes()
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
        for name in expected:
            expected[name] = decay * expected[name] + (1 - decay) * weights[name]
            average = made[f"step-{step + 1}.ema.safetensors"][name]
            torch.testing.assert_close(average, expected[name])
        assert not same(made[f"step-{step + 1}.ema.safetensors"], weights)
    with safe_open(tmp_path / "step-4.ema.safetensors", "pt") as file:
        assert file.metadata()["ema_decay"] == "0.15"
    with safe_open(tmp_path / "step-4.safetensors", "pt") as file:
        assert "ema_decay" not in file.metadata()


def test_a_header_records_masks_where_the_loss_has_them(
    here: Path, tmp_path: Path
) -> None:
    flags = {"mask_column": "image", "unmasked_weight": 0.5}
    out = train(here, output_path=tmp_path, max_steps=1, **flags)
    _, header = read_tensors(out / "step-1.safetensors")
    recipe = json.loads(header["recipe"])
    assert recipe.items() >= {**flags, "alpha_mask": False}.items()
