"""DiffSynth-Studio's commands for the models that are not Qwen's own and for what is added
to it, run on toys: only the number of steps is ours.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain.cli.main import main
from dstrain_qwen_image.toy import write
from PIL import Image
from safetensors.torch import load_file

FIRERED = "FireRedTeam/FireRed-Image-Edit-1"
CONTROL = "DiffSynth-Studio/Qwen-Image-Layered-Control"
TRANSFORMER = "transformer/diffusion_pytorch_model*.safetensors"
TEXT_ENCODER = "Qwen/Qwen-Image:text_encoder/model*.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TARGETS = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,"
    "to_out.0,to_add_out,img_mlp.net.2,img_mod.1,txt_mlp.net.2,txt_mod.1"
)
LORA = f"""--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt pipe.dit. --lora_base_model dit
    --lora_target_modules {TARGETS}
    --use_gradient_checkpointing --dataset_num_workers 8 --find_unused_parameters"""
FULL = """--learning_rate 1e-5 --num_epochs 2 --remove_prefix_in_ckpt pipe.dit. --trainable_models dit
    --use_gradient_checkpointing --find_unused_parameters"""
EDIT = "--data_file_keys image,edit_image"
LAYERS = "--data_file_keys image,layer_input_image --extra_inputs layer_num,layer_input_image"
CONTEXT = (
    "--data_file_keys image,context_image --extra_inputs context_image --lora_rank 64"
)
MASKED = """--data_file_keys image,layer_input_image,context_image
    --extra_inputs layer_num,layer_input_image,context_image"""

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 8 worker processes:UserWarning"
)


def place(model_id: str, variant: str, *folders: str) -> None:
    """Write these folders of a variant's toy where a published model has them."""
    target = Path("models") / model_id
    if not target.is_dir():
        write(Path("toy") / variant, variant)
    for folder in folders:
        shutil.copytree(Path("toy") / variant / folder, target / folder)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with one for a dataset."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name in range(3):
        pixels = np.random.default_rng(name).integers(0, 256, (32, 32, 4), np.uint8)
        Image.fromarray(pixels).save(f"data/{name}.png")
    return Path("data")


def train(options: str, models: str, row: dict[str, Any]) -> dict[str, Any]:
    """Run a command on a dataset of one row; return the weights that it saves."""
    Path("data/metadata.json").write_text(json.dumps([{"prompt": "a dog", **row}]))
    words = ["--model", "qwen_image", "--dataset_base_path", "data", *options.split()]
    words += ["--model_id_with_origin_paths", models, "--max_pixels", "1048576"]
    words += ["--output_path", "out", "--dataset_repeat", "1", "--max_steps", "1"]
    assert main(words) == 0
    (saved,) = Path("out").glob("*.safetensors")
    return load_file(saved)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("options", "version"),
    [(f"{FULL} {EDIT} --extra_inputs edit_image", ".0"), (f"{LORA} {EDIT}", ".1")],
)
def test_firered_is_trained(options: str, version: str) -> None:
    place(f"{FIRERED}{version}", "edit-2509", "transformer")
    place("Qwen/Qwen-Image", "edit-2509", "text_encoder", "vae")
    place("Qwen/Qwen-Image-Edit", "edit-2509", "processor")
    models = f"{FIRERED}{version}:{TRANSFORMER},{TEXT_ENCODER},Qwen/Qwen-Image:{VAE}"
    row = {"image": "0.png", "edit_image": ["1.png", "2.png"]}
    assert train(f"{options} --edit_pixels 1024 --edit_text_pixels 3136", models, row)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("options", [f"{FULL} {LAYERS}", f"{LORA} {MASKED}"])
def test_layered_control_is_trained(options: str) -> None:
    place(CONTROL, "layered", "transformer")
    place("Qwen/Qwen-Image", "layered", "text_encoder", "tokenizer")
    place("Qwen/Qwen-Image-Layered", "layered", "vae")
    models = f"{CONTROL}:{TRANSFORMER},{TEXT_ENCODER},Qwen/Qwen-Image-Layered:{VAE}"
    row = {"image": ["0.png", "1.png"], "layer_num": 1, "layer_input_image": "2.png"}
    assert train(options, models, {**row, "context_image": "0.png"})


@pytest.mark.usefixtures("data")
def test_in_context_control_is_trained_from_a_lora() -> None:
    place("Qwen/Qwen-Image", "base", "transformer", "text_encoder", "vae", "tokenizer")
    models = f"Qwen/Qwen-Image:{TRANSFORMER},{TEXT_ENCODER},Qwen/Qwen-Image:{VAE}"
    row = {"image": "0.png", "context_image": "1.png"}
    first = train(f"{LORA} {CONTEXT}", models, row)
    Path("out").rename("first")
    (published,) = Path("first").glob("*.safetensors")
    options = f"{LORA} {CONTEXT} --lora_checkpoint {published}"
    second = train(options, models, row)
    assert first.keys() == second.keys()
    assert any(bool((first[name] != second[name]).any()) for name in first)
