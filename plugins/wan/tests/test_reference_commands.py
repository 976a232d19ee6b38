"""DiffSynth-Studio's commands for Wan resolve as they are: only the program's
name is ours.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from dstrain import Frames
from dstrain.cli.main import main
from dstrain.data import write_video
from dstrain.models import to_checkpoint
from dstrain_wan.components import COMPONENTS
from dstrain_wan.toy import write
from safetensors.torch import load_file, save_file

from tests.support import everyday

BY_NAME = {component.name: component for component in COMPONENTS}

DATA = """--dataset_base_path data --dataset_metadata_path data/metadata.csv --height 480 --width 832
    --num_frames 49 --dataset_repeat 100"""
LORA = """--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt "pipe.dit." --lora_base_model "dit"
    --lora_target_modules "q,k,v,o,ffn.0,ffn.2" --lora_rank 32"""
TEXT = "models_t5_umt5-xxl-enc-bf16.pth"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
EXPERT = "{}_noise_model/diffusion_pytorch_model*.safetensors"
IMAGE = '--extra_inputs "input_image"'
WEIGHTS = "diffusion_pytorch_model*.safetensors"
SPEED = "DiffSynth-Studio/Wan2.1-1.3b-speedcontrol-v1"
ENDS = '--extra_inputs "input_image,end_image"'
CELLS = {
    "control_video": "control.mp4",
    "vace_video": "control.mp4",
    "camera_control_direction": "Left",
    "camera_control_speed": "0.02",
    "motion_bucket_id": "30",
}
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
    (
        "PAI/Wan2.1-Fun-V1.1-1.3B-Control",
        (WEIGHTS, TEXT, "Wan2.1_VAE.pth", CLIP),
        "--data_file_keys video,control_video,reference_image --extra_inputs control_video,reference_image",
        "fun-control-ref",
        "dit",
    ),
    (
        "PAI/Wan2.2-Fun-A14B-Control-Camera",
        (EXPERT.format("low"), TEXT, "Wan2.1_VAE.pth"),
        "--data_file_keys video,control_video,reference_image --extra_inputs "
        "input_image,camera_control_direction,camera_control_speed --min_timestep_boundary 0.358",
        "fun-camera-a14b",
        "dit2",
    ),
    (
        "PAI/Wan2.2-VACE-Fun-A14B",
        (EXPERT.format("low"), TEXT, "Wan2.1_VAE.pth"),
        "--lora_base_model vace --data_file_keys video,vace_video,vace_reference_image "
        "--extra_inputs vace_video,vace_reference_image --min_timestep_boundary 0.358",
        "vace-a14b",
        "vace2",
    ),
    (
        "Wan2.1-T2V-1.3B",
        (WEIGHTS, TEXT, "Wan2.1_VAE.pth", f"{SPEED}:model.safetensors"),
        "--extra_inputs motion_bucket_id",
        "speedcontrol",
        "dit",
    ),
    (
        "krea/krea-realtime-video",
        (
            "krea-realtime-video-14b.safetensors",
            f"Wan-AI/Wan2.1-T2V-14B:{TEXT}",
            "Wan-AI/Wan2.1-T2V-14B:Wan2.1_VAE.pth",
        ),
        "",
        "t2v",
        "dit",
    ),
]


@pytest.fixture
def quick(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `make everything` counts the memory that videos of this size need."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("is not counted")

    if not pytestconfig.getoption("--all-cases"):
        monkeypatch.setattr("dstrain.runs.memory.facts.count_activations", refuse)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("model", "files", "flags", "variant", "part"),
    everyday.cases(COMMANDS, lambda row: row[3] in ("t2v", "i2v-a14b", "vace-a14b")),
    ids=[f"{row[0]}-{row[3]}-{row[4]}" for row in COMMANDS],
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
    row = {"video": "video.mp4", "prompt": "a dog"}
    for words in re.findall(r"--(?:data_file_keys|extra_inputs) (\S+)", flags):
        for name in words.strip('"').split(","):
            if name not in ("input_image", "end_image", *row):
                row[name] = CELLS.get(name, f"{name}.png")
    lines = [",".join(row), ",".join(row.values())]
    (tmp_path / "data/metadata.csv").write_text("\n".join(lines) + "\n")
    model_id = model if "/" in model else f"Wan-AI/{model}"
    origins = ",".join(file if ":" in file else f"{model_id}:{file}" for file in files)
    command = f'--model wan {DATA} --model_id_with_origin_paths "{origins}" --output_path models/train {LORA} {flags}'
    assert main([*shlex.split(command), "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert f"wan {variant}, task sft, trains {part}\n" in printed
    loaded = re.findall(r"loads (.*)", printed)
    in_training = loaded[1].split(", ")
    assert part in in_training
    assert {"dit", "dit2"}.intersection(in_training) == {
        "dit2" if part.endswith("2") else "dit"
    }


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


def test_a_transformer_with_a_prefix_is_trained_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command for krea-realtime-video, at the size of a toy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path / "models"))
    write(tmp_path / "toy", "t2v")
    shared = tmp_path / "models/Wan-AI/Wan2.1-T2V-14B"
    krea = tmp_path / "models/krea/krea-realtime-video"
    krea.mkdir(parents=True)
    for component, folder, file in (
        ("dit", "transformer", krea / "krea-realtime-video-14b.safetensors"),
        ("text_encoder", "text_encoder", shared / TEXT),
        ("vae", "vae", shared / "Wan2.1_VAE.pth"),
    ):
        shutil.copytree(tmp_path / "toy" / folder, shared / folder)
        weights = {}
        for path in (shared / folder).glob("*.safetensors"):
            weights |= load_file(path)
            path.unlink()
        if component == "dit":
            original = to_checkpoint(BY_NAME["dit"].formats[0], weights)
            named = {f"model.{name}": weight for name, weight in original.items()}
            save_file(named, file)
            sizes = {"dim": 24, "num_heads": 2, "ffn_dim": 64, "num_layers": 2}
            channels = {"in_dim": 16, "out_dim": 16, "freq_dim": 256}
            (krea / "config.json").write_text(json.dumps({**sizes, **channels}))
        else:
            torch.save(weights, file)
    video = Frames(torch.zeros(5, 32, 32, 3, dtype=torch.uint8), 16.0)
    (tmp_path / "data").mkdir()
    write_video(video, tmp_path / "data/video.mp4")
    (tmp_path / "data/metadata.csv").write_text("video,prompt\nvideo.mp4,a dog\n")
    origins = (
        "krea/krea-realtime-video:krea-realtime-video-14b.safetensors,"
        f"Wan-AI/Wan2.1-T2V-14B:{TEXT},Wan-AI/Wan2.1-T2V-14B:Wan2.1_VAE.pth"
    )
    command = (
        f'--model wan {DATA} --model_id_with_origin_paths "{origins}" '
        f"--output_path out {LORA} --tokenizer_path toy/tokenizer "
        "--height 32 --width 32 --num_frames 5 --max_steps 1 --mixed_precision no"
    )
    assert main(shlex.split(command)) == 0
    saved = load_file(tmp_path / "out/step-1.safetensors")
    assert any(name.startswith("blocks.0.self_attn.q.lora_B") for name in saved)
