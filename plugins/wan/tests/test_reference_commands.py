"""DiffSynth-Studio's commands for Wan resolve as they are: only the program's
name is ours.
"""

import re
import shlex
from pathlib import Path

import pytest
from dstrain.cli.main import main

DATA = """--dataset_base_path data --dataset_metadata_path data/metadata.csv --height 480 --width 832
    --num_frames 49 --dataset_repeat 100"""
LORA = """--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt "pipe.dit." --lora_base_model "dit"
    --lora_target_modules "q,k,v,o,ffn.0,ffn.2" --lora_rank 32"""
TEXT = "models_t5_umt5-xxl-enc-bf16.pth"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
EXPERT = "{}_noise_model/diffusion_pytorch_model*.safetensors"
IMAGE = '--extra_inputs "input_image"'
WEIGHTS = "diffusion_pytorch_model*.safetensors"
ENDS = '--extra_inputs "input_image,end_image"'
# Model, files, further flags, the variant and the expert that are meant.
COMMANDS = [
    ("Wan2.1-T2V-1.3B", (WEIGHTS, TEXT, "Wan2.1_VAE.pth"), "", "t2v", "dit"),
    (
        "Wan2.1-I2V-14B-480P",
        (WEIGHTS, TEXT, "Wan2.1_VAE.pth", CLIP),
        IMAGE,
        "i2v",
        "dit",
    ),
    (
        "Wan2.2-T2V-A14B",
        (EXPERT.format("high"), TEXT, "Wan2.1_VAE.pth"),
        "--max_timestep_boundary 0.417 --min_timestep_boundary 0",
        "t2v-a14b",
        "dit",
    ),
    (
        "Wan2.2-T2V-A14B",
        (EXPERT.format("low"), TEXT, "Wan2.1_VAE.pth"),
        "--max_timestep_boundary 1 --min_timestep_boundary 0.417",
        "t2v-a14b",
        "dit2",
    ),
    (
        "Wan2.2-I2V-A14B",
        (EXPERT.format("high"), TEXT, "Wan2.1_VAE.pth"),
        f"{IMAGE} --max_timestep_boundary 0.358 --min_timestep_boundary 0",
        "i2v-a14b",
        "dit",
    ),
    (
        "Wan2.2-I2V-A14B",
        (EXPERT.format("low"), TEXT, "Wan2.1_VAE.pth"),
        f"{IMAGE} --max_timestep_boundary 1 --min_timestep_boundary 0.358",
        "i2v-a14b",
        "dit2",
    ),
    ("Wan2.2-TI2V-5B", (WEIGHTS, TEXT, "Wan2.2_VAE.pth"), IMAGE, "ti2v-5b", "dit"),
    (
        "Wan2.1-FLF2V-14B-720P",
        (WEIGHTS, TEXT, "Wan2.1_VAE.pth", CLIP),
        ENDS,
        "flf2v",
        "dit",
    ),
    (
        "PAI/Wan2.1-Fun-V1.1-1.3B-InP",
        (WEIGHTS, TEXT, "Wan2.1_VAE.pth", CLIP),
        ENDS,
        "i2v",
        "dit",
    ),
    (
        "PAI/Wan2.2-Fun-A14B-InP",
        (EXPERT.format("low"), TEXT, "Wan2.1_VAE.pth"),
        f"{ENDS} --max_timestep_boundary 1 --min_timestep_boundary 0.358",
        "i2v-a14b",
        "dit2",
    ),
]


@pytest.fixture
def quick(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `make conformance` counts the memory that videos of this size need."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("is not counted")

    if not pytestconfig.getoption("--all-variants"):
        monkeypatch.setattr("dstrain.runs.memory.facts.count_activations", refuse)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("model", "files", "flags", "variant", "part"),
    COMMANDS,
    ids=[f"{row[0]}-{row[4]}" for row in COMMANDS],
)
def test_the_commands_of_the_documents_mean_the_variant_and_the_expert(
    model: str,
    files: tuple[str, ...],
    flags: str,
    variant: str,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/metadata.csv").write_text("video,prompt\nvideo.mp4,a dog\n")
    model_id = model if "/" in model else f"Wan-AI/{model}"
    origins = ",".join(f"{model_id}:{file}" for file in files)
    command = f'--model wan {DATA} --model_id_with_origin_paths "{origins}" --output_path models/train {LORA} {flags}'
    assert main([*shlex.split(command), "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert f"wan {variant}, task sft, trains {part}\n" in printed
    loaded = re.findall(r"loads (.*)", printed)
    assert loaded[1] == part


I2V = "Wan-AI/Wan2.1-I2V-14B-480P"
ALL = ",".join(f"{I2V}:{file}" for file in (WEIGHTS, TEXT, "Wan2.1_VAE.pth", CLIP))
FROZEN = ALL.partition(",")[2]


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (f'--fp8_models "{ALL}"', "dit text_encoder vae image_encoder"),
        (
            f'--task sft:train --offload_models "{FROZEN}" --fp8_models "{I2V}:{WEIGHTS}" '
            "--use_gradient_checkpointing_offload",
            "dit text_encoder vae image_encoder",
        ),
        (f'--task sft:data_process --offload_models "{I2V}:{WEIGHTS}"', "dit"),
    ],
    ids=["fp8", "stage 2 in little memory", "stage 1 of it"],
)
def test_commands_may_name_components_by_their_files(
    flags: str,
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # Their bytes take seconds to add up.
    monkeypatch.setattr(
        "dstrain.runs.runner.described_with_bytes",
        lambda setup, plan: dict.fromkeys(setup.kept, ""),
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data/metadata.csv").write_text("video,prompt\nvideo.mp4,a dog\n")
    command = f'graph --model wan {DATA} --model_id_with_origin_paths "{ALL}" --output_path out {LORA} {IMAGE} {flags}'
    assert main(shlex.split(command)) == 0
    shown = capsys.readouterr().out.partition("how weights are kept\n")[2]
    assert {line.split()[0] for line in shown.splitlines()} == set(kept.split())
