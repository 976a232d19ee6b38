"""DiffSynth-Studio's commands for Qwen-Image mean their model as they are, and --model_id
means what they write out; run on toys, they save what they publish.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from dstrain.cli.main import main
from dstrain.plugin.functional import pack
from dstrain_qwen_image import MODEL
from PIL import Image
from safetensors.torch import load_file

from tests.support.once import once
from tests.support.published_commands import (
    StandIns,
    assert_means,
    long_form,
    make_data,
    published_commands,
    short_form,
)
from tests.support.toys import toy

COMMANDS = {one.name: one for one in published_commands() if one.family == "qwen_image"}
TRANSFORMER = "transformer/diffusion_pytorch_model*.safetensors"
SHARED = """Qwen/Qwen-Image:text_encoder/model*.safetensors
    Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"""
EPOCHS = 5
"""Those of the commands in two stages and in one."""


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_means_a_variant(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_means(COMMANDS[name], main, capsys)


@pytest.mark.parametrize(
    ("model_id", "pattern"),
    [
        ("Qwen/Qwen-Image", TRANSFORMER),
        ("Qwen/Qwen-Image-2512", TRANSFORMER),
        ("Qwen/Qwen-Image-Edit-2509", TRANSFORMER),
        ("Qwen/Qwen-Image-Edit-2511", TRANSFORMER),
        (
            "DiffSynth-Studio/Qwen-Image-Distill-Full",
            "diffusion_pytorch_model*.safetensors",
        ),
        ("FireRedTeam/FireRed-Image-Edit-1.0", TRANSFORMER),
        ("FireRedTeam/FireRed-Image-Edit-1.1", TRANSFORMER),
    ],
)
def test_an_id_is_the_files_of_the_published_command(
    model_id: str, pattern: str
) -> None:
    long = long_form(MODEL, f"{model_id}:{pattern} {SHARED}")
    assert short_form(MODEL, model_id) == long


def write_runs(folder: Path) -> None:
    """Run the commands that train in one stage and in two on one dataset."""
    folder.mkdir()
    one, first, second = (
        COMMANDS[f"Qwen-Image{name}"]
        for name in ("_lora", "-LoRA-splited-cache", "-LoRA-splited")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_data(one, "base", folder)
        stand_ins = StandIns(MODEL, "base", folder, toy("qwen_image", "base"))
        stand_ins.write(one.origins)
        small = ["--dataset_repeat", "1", "--dataset_num_workers", "0"]
        small += ["--max_pixels", "4096"]
        with stand_ins.configured():
            for command in (one, first, second):
                assert main(command.argv(*small)) == 0


@pytest.fixture(scope="module")
def runs() -> Path:
    return once("qwen-image-in-one-stage-and-in-two", write_runs)


def test_in_two_stages_a_command_trains_what_it_trains_in_one(runs: Path) -> None:
    folders = [
        runs / COMMANDS[name].values["--output_path"]
        for name in ("Qwen-Image_lora", "Qwen-Image-LoRA-splited")
    ]
    names = [f"epoch-{epoch}.safetensors" for epoch in range(EPOCHS)]
    for folder in folders:
        assert sorted(path.name for path in folder.glob("*.safetensors")) == names
        steps = (folder / "logs/loss.csv").read_text().splitlines()[1:]
        assert len(steps) == 3 * EPOCHS
        assert {float(row.split(",")[3]) for row in steps} == {1e-4}
    for name in names:
        unsplit, split = (load_file(folder / name) for folder in folders)
        assert unsplit.keys() == split.keys()
        assert all(torch.equal(unsplit[key], split[key]) for key in unsplit)
        assert any(one.any() for key, one in unsplit.items() if "lora_B" in key)


@torch.no_grad()
def test_the_saved_lora_gives_the_same_image_in_generate_and_in_diffusers(
    runs: Path, tmp_path: Path
) -> None:
    """The command asks for DiffSynth-Studio's names, which diffusers does not read."""
    folder = toy("qwen_image", "base")
    output = runs / COMMANDS["Qwen-Image_lora"].values["--output_path"]
    lora = output / f"epoch-{EPOCHS - 1}.safetensors"
    words = f"generate --model_id {folder} --variant base --prompt dog --seed 3"
    words += " --guidance_scale 1 --num_inference_steps 2 --height 64 --width 64"
    for name, more in (("plain.png", []), ("trained.png", ["--lora", str(lora)])):
        code = main([*words.split(), *more, "--output", str(tmp_path / name)])
        assert code == 0
    published = QwenImagePipeline.from_pretrained(folder)
    published.set_progress_bar_config(disable=True)
    readable = tmp_path / "diffusers.safetensors"
    assert main(["export", "--format", "diffusers", str(lora), str(readable)]) == 0
    published.load_lora_weights(readable)
    noise = torch.randn((1, 16, 8, 8), generator=torch.Generator().manual_seed(3))
    image = published(
        prompt="dog",
        true_cfg_scale=1.0,
        num_inference_steps=2,
        height=64,
        width=64,
        latents=pack(noise),
    ).images[0]
    plain, trained = (
        np.asarray(Image.open(tmp_path / name)) for name in ("plain.png", "trained.png")
    )
    assert np.array_equal(trained, np.asarray(image))
    assert not np.array_equal(trained, plain)
