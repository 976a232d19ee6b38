"""DiffSynth-Studio's commands for Wan mean their model as they are, and --model_id means what
they write out.
"""

from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain_wan import MODEL
from safetensors.torch import load_file, save_file

from tests.support.published_commands import (
    StandIns,
    assert_means,
    long_form,
    make_data,
    published_commands,
    short_form,
    train,
    write_header,
)
from tests.support.toys import toy

COMMANDS = {one.name: one for one in published_commands() if one.family == "wan"}
KEPT = {
    "Wan2.1-I2V-14B-480P_lora_lowvram": {"dit", "text_encoder", "vae", "image_encoder"},
    # It names the denoiser, which its stage does not load.
    "Wan2.1-I2V-14B-480P_lora_split_cache": set(),
}
WEIGHTS = "diffusion_pytorch_model*.safetensors"
TEXT = "models_t5_umt5-xxl-enc-bf16.pth"
VAE = "Wan2.1_VAE.pth"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
EXPERTS = (f"high_noise_model/{WEIGHTS}", f"low_noise_model/{WEIGHTS}")


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_means_a_variant_and_an_expert_or_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_means(COMMANDS[name], main, capsys)


@pytest.mark.parametrize("name", KEPT)
def test_a_command_may_name_components_by_their_files(
    name: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_header(COMMANDS[name], empty)
    assert main(["graph", *COMMANDS[name].argv()]) == 0
    _, _, page = capsys.readouterr().out.partition("weights are kept\n")
    lines = [line.split() for line in page.splitlines() if line.startswith("    ")]
    assert {words[0] for words in lines} & {*MODEL.spec("i2v").components} == KEPT[name]


def test_a_transformer_with_a_prefix_is_trained_by_its_command(empty: Path) -> None:
    command, folder = COMMANDS["krea-realtime-video_lora"], toy("wan", "t2v")
    make_data(command, "t2v", empty)
    stand_ins = StandIns(MODEL, "t2v", empty, folder)
    stand_ins.write(command.origins)
    model_id, name = command.origins[0]
    file = empty / "models" / model_id / name
    save_file({f"model.{key}": one for key, one in load_file(file).items()}, file)
    with stand_ins.configured():
        assert train(command, "t2v", folder, main) == 0
    (saved,) = Path(command.values["--output_path"]).glob("*.safetensors")
    assert "blocks.0.self_attn.q.lora_B.weight" in load_file(saved)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("Wan2.1-T2V-1.3B", (WEIGHTS, TEXT, VAE)),
        ("Wan2.1-T2V-14B", (WEIGHTS, TEXT, VAE)),
        ("Wan2.1-I2V-14B-480P", (WEIGHTS, TEXT, VAE, CLIP)),
        ("Wan2.1-I2V-14B-720P", (WEIGHTS, TEXT, VAE, CLIP)),
        ("Wan2.2-TI2V-5B", (WEIGHTS, TEXT, "Wan2.2_VAE.pth")),
        ("Wan2.1-FLF2V-14B-720P", (WEIGHTS, TEXT, VAE, CLIP)),
        ("Wan2.2-T2V-A14B", (*EXPERTS, TEXT, VAE)),
        ("Wan2.2-I2V-A14B", (*EXPERTS, TEXT, VAE)),
    ],
)
def test_an_id_is_the_files_of_the_published_commands(
    name: str, files: tuple[str, ...]
) -> None:
    long = long_form(MODEL, " ".join(f"Wan-AI/{name}:{file}" for file in files))
    assert short_form(MODEL, f"Wan-AI/{name}") == long


def test_experts_of_comfyui_are_told_apart_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        # In the order of their names, low comes first.
        "transformer": "diffusion_models/wan2.2_t2v_B_high_noise_14B.safetensors",
        "transformer_2": "diffusion_models/wan2.2_t2v_A_low_noise_14B.safetensors",
        "text_encoder": "text_encoders/umt5_xxl.safetensors",
        "vae": "vae/wan_2.1_vae.safetensors",
    }
    for place, name in places.items():
        weights = {}
        for path in (toy("wan", "t2v-a14b") / place).glob("*.safetensors"):
            weights |= load_file(path)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file(weights, tmp_path / name)
    found = short_form(MODEL, str(tmp_path))
    assert {one.component: one.path for one in found if one.component} == {
        "dit": (str(tmp_path / places["transformer"]),),
        "dit2": (str(tmp_path / places["transformer_2"]),),
    }
    words = ["graph", "--model_id", str(tmp_path), "--variant", "t2v-a14b"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("wan t2v-a14b, ")
