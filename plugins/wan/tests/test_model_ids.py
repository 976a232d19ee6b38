"""--model_id means what DiffSynth-Studio's commands write out; a local toy is told, too."""

from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain_wan import MODEL
from dstrain_wan.toy import write
from safetensors.torch import load_file, save_file

from tests.support import everyday
from tests.support.short_forms import long_form, short_form

WEIGHTS = "diffusion_pytorch_model*.safetensors"
TEXT = "models_t5_umt5-xxl-enc-bf16.pth"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
VAE = "Wan2.1_VAE.pth"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("Wan2.1-T2V-1.3B", (WEIGHTS, TEXT, VAE)),
        ("Wan2.1-T2V-14B", (WEIGHTS, TEXT, VAE)),
        ("Wan2.1-I2V-14B-480P", (WEIGHTS, TEXT, VAE, CLIP)),
        ("Wan2.1-I2V-14B-720P", (WEIGHTS, TEXT, VAE, CLIP)),
        ("Wan2.2-TI2V-5B", (WEIGHTS, TEXT, "Wan2.2_VAE.pth")),
        ("Wan2.1-FLF2V-14B-720P", (WEIGHTS, TEXT, VAE, CLIP)),
    ],
)
def test_an_id_is_the_files_of_the_published_command(
    name: str, files: tuple[str, ...]
) -> None:
    long = long_form(MODEL, " ".join(f"Wan-AI/{name}:{file}" for file in files))
    assert short_form(MODEL, f"Wan-AI/{name}") == long


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ("Wan-AI/Wan2.2-Animate-14B", "Wan2.2-Animate"),
        ("Wan-AI/Wan2.2-Animate-2-14B", "Wan2.2-Animate-2"),
        ("Wan-AI/Wan2.2-S2V-14B", "Wan2.2-S2V"),
        ("meituan-longcat/LongCat-Video", "LongCat-Video"),
        ("Wan-AI/Wan-Dancer-14B", "Wan-Dancer"),
        ("ByteDance/Video-As-Prompt-Wan2.1-14B", "Video-As-Prompt"),
    ],
)
def test_a_model_that_no_variant_is_for_is_refused_by_name(
    given: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "wan", "--output_path", "out", "--dry_run"]
    assert main([*words, "--model_id_with_origin_paths", f"{given}:{WEIGHTS}"]) == 2
    assert f"{model} is not supported yet by wan" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Wan2.2-T2V-A14B", "Wan2.2-I2V-A14B"])
def test_an_id_of_two_experts_is_the_files_of_both_commands(name: str) -> None:
    files = [f"{noise}_noise_model/{WEIGHTS}" for noise in ("high", "low")]
    long = long_form(
        MODEL, " ".join(f"Wan-AI/{name}:{file}" for file in (*files, TEXT, VAE))
    )
    assert short_form(MODEL, f"Wan-AI/{name}") == long


@pytest.mark.parametrize(
    "variant", everyday.cases(MODEL.variants, lambda name: name == "vace-a14b")
)
def test_a_toy_is_named_by_its_folder(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "toy", variant)
    words = ["graph", "--model_id", str(tmp_path / "toy"), "--variant", variant]
    assert main([*words, "--tokenizer_path", "elsewhere"]) == 0
    assert f"wan {variant}, task sft" in capsys.readouterr().out


def test_experts_of_comfyui_are_told_apart_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "toy", "t2v-a14b")
    places = {
        # In the order of their names, low comes first.
        "transformer": "diffusion_models/wan2.2_t2v_B_high_noise_14B.safetensors",
        "transformer_2": "diffusion_models/wan2.2_t2v_A_low_noise_14B.safetensors",
        "text_encoder": "text_encoders/umt5_xxl.safetensors",
        "vae": "vae/wan_2.1_vae.safetensors",
    }
    for place, name in places.items():
        weights = {}
        for path in (tmp_path / "toy" / place).glob("*.safetensors"):
            weights |= load_file(path)
        target = tmp_path / "comfy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, target)
    found = short_form(MODEL, str(tmp_path / "comfy"))
    paths = {one.component: one.path for one in found if one.component}
    assert paths == {
        "dit": (str(tmp_path / "comfy" / places["transformer"]),),
        "dit2": (str(tmp_path / "comfy" / places["transformer_2"]),),
    }
    words = ["graph", "--model_id", str(tmp_path / "comfy"), "--variant", "t2v-a14b"]
    assert main(words) == 0
    assert "wan t2v-a14b, task sft" in capsys.readouterr().out
