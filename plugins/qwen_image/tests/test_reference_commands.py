"""DiffSynth-Studio's commands for Qwen-Image, run as they are: only the program's
name and the files are ours, and in the ordinary suite the dataset is repeated less often.
"""

import json
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from dstrain.cli.main import main
from dstrain_qwen_image.model_fn import pack
from dstrain_qwen_image.toy import write
from PIL import Image
from safetensors.torch import load_file

from tests.support.forks import run_python

TRANSFORMER = "Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors"
TEXT_ENCODER = "Qwen/Qwen-Image:text_encoder/model*.safetensors"
VAE = "Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"
TARGETS = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,"
    "to_out.0,to_add_out,img_mlp.net.2,img_mod.1,txt_mlp.net.2,txt_mod.1"
)
DATA = """--dataset_base_path data/example_image_dataset
    --dataset_metadata_path data/example_image_dataset/metadata.csv"""
LORA = f"""--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt "pipe.dit." --lora_base_model "dit"
    --lora_target_modules "{TARGETS}" --lora_rank 32 --use_gradient_checkpointing --dataset_num_workers 8
    --find_unused_parameters"""
UNSPLIT = f"""--model qwen_image {DATA} --max_pixels 1048576 --dataset_repeat 50
    --model_id_with_origin_paths "{TRANSFORMER},{TEXT_ENCODER},{VAE}"
    --output_path "./models/train/Qwen-Image_lora" {LORA}"""
FIRST_STAGE = f"""--model qwen_image {DATA} --max_pixels 1048576 --dataset_repeat 1
    --model_id_with_origin_paths "{TEXT_ENCODER},{VAE}"
    --output_path "./models/train/Qwen-Image-LoRA-splited-cache" {LORA} --task "sft:data_process" """
SECOND_STAGE = f"""--model qwen_image --dataset_base_path "./models/train/Qwen-Image-LoRA-splited-cache"
    --max_pixels 1048576 --dataset_repeat 50 --model_id_with_origin_paths "{TRANSFORMER}"
    --output_path "./models/train/Qwen-Image-LoRA-splited" {LORA} --task "sft:train" """
DOCUMENTED = 50
"""Repeats of the dataset in these commands."""
SHORT = f"""--model qwen_image {DATA} --output_path out --learning_rate 1e-2 --max_steps 3 --batch_size 2
    --model_id_with_origin_paths "{TRANSFORMER},{TEXT_ENCODER},{VAE}" --feature_cache cache"""

# torch says so on machines with fewer cores than --dataset_num_workers; the reference
# commands ask for 8.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 8 worker processes:UserWarning"
)


def make_project(folder: Path) -> Path:
    """A folder in which the commands find a toy model and two captioned images where
    the published ones would be.
    """
    write(folder / "models/Qwen/Qwen-Image")
    make_data(folder / "data/example_image_dataset")
    return folder


def make_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{i}.png")
    (folder / "metadata.csv").write_text(
        'image,prompt\n0.png,a dog\n1.png,"a cat, and a longer prompt"\n'
    )


@pytest.fixture(scope="module")
def repeats(pytestconfig: pytest.Config) -> int:
    """How often the commands repeat the dataset: in `make everything` as documented."""
    return DOCUMENTED if pytestconfig.getoption("--all-cases") else 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, repeats: int) -> Path:
    """A project in which the three commands were run, in the documents' order; the
    first stage by `python -m`.
    """
    folder = make_project(tmp_path_factory.mktemp("reference"))
    written = f"--dataset_repeat {DOCUMENTED}"
    unsplit, second_stage = (
        shlex.split(command.replace(written, f"--dataset_repeat {repeats}"))
        for command in (UNSPLIT, SECOND_STAGE)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(unsplit) == 0
        stage_1 = [sys.executable, "-m", "dstrain", *shlex.split(FIRST_STAGE)]
        run_python(stage_1, check=True)
        assert main(second_stage) == 0
    return folder / "models/train"


@pytest.fixture
def project(toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh project, as the working directory."""
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


def test_the_commands_of_the_documents_run_and_save_once_per_epoch(
    reference: Path, repeats: int
) -> None:
    for name in ("Qwen-Image_lora", "Qwen-Image-LoRA-splited"):
        saved = sorted(path.name for path in (reference / name).glob("*.safetensors"))
        assert saved == [f"epoch-{epoch}.safetensors" for epoch in range(5)]
        steps = (reference / name / "logs/loss.csv").read_text().splitlines()[1:]
        assert len(steps) == 2 * repeats * 5
        assert {float(row.split(",")[3]) for row in steps} == {1e-4}


def test_the_split_commands_train_the_same_weights_as_the_unsplit_one(
    reference: Path,
) -> None:
    for epoch in range(5):
        unsplit = load_file(
            reference / "Qwen-Image_lora" / f"epoch-{epoch}.safetensors"
        )
        split = load_file(
            reference / "Qwen-Image-LoRA-splited" / f"epoch-{epoch}.safetensors"
        )
        assert unsplit.keys() == split.keys()
        assert all(torch.equal(unsplit[name], split[name]) for name in unsplit)
        assert any(
            name.endswith("lora_B.weight") and unsplit[name].abs().max() > 1e-4
            for name in unsplit
        )


@torch.no_grad()
def test_the_saved_lora_gives_the_same_image_in_generate_and_in_diffusers(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command asks for DiffSynth-Studio's names, which diffusers does not read."""
    monkeypatch.chdir(reference.parents[1])
    lora = reference / "Qwen-Image_lora/epoch-4.safetensors"
    command = f"""generate --model qwen_image --model_id_with_origin_paths "{TRANSFORMER},{TEXT_ENCODER},{VAE}"
        --prompt dog --guidance_scale 1 --num_inference_steps 2 --height 64 --width 64 --seed 3"""
    for output, more in (("plain.png", []), ("trained.png", ["--lora", str(lora)])):
        assert (
            main([*shlex.split(command), *more, "--output", str(tmp_path / output)])
            == 0
        )
    published = QwenImagePipeline.from_pretrained("models/Qwen/Qwen-Image")
    published.set_progress_bar_config(disable=True)
    readable = tmp_path / "diffusers.safetensors"
    assert main(["export", "--format", "diffusers", str(lora), str(readable)]) == 0
    published.load_lora_weights(readable)
    noise = torch.randn((1, 16, 1, 8, 8), generator=torch.Generator().manual_seed(3))
    arguments = {
        "prompt": "dog",
        "true_cfg_scale": 1.0,
        "num_inference_steps": 2,
        "height": 64,
        "width": 64,
    }
    image = published(**arguments, latents=pack(noise)).images[0]
    plain, trained = (
        np.asarray(Image.open(tmp_path / name)) for name in ("plain.png", "trained.png")
    )
    assert np.array_equal(trained, np.asarray(image))
    assert not np.array_equal(trained, plain)


def test_model_paths_as_nested_json_train_the_same_weights_as_model_ids(
    project: Path,
) -> None:
    model = project / "models/Qwen/Qwen-Image"
    shards = [
        str(path) for path in sorted((model / "transformer").glob("*.safetensors"))
    ]
    assert len(shards) == 2
    paths = [
        shards,
        str(model / "text_encoder/model.safetensors"),
        str(model / "vae/diffusion_pytorch_model.safetensors"),
    ]
    common = f"--model qwen_image {DATA} --learning_rate 1e-2 --lora_rank 4 --dataset_repeat 2"
    ids = f'--model_id_with_origin_paths "{TRANSFORMER},{TEXT_ENCODER},{VAE}" --output_path by_id'
    assert main(shlex.split(f"{common} {ids}")) == 0
    assert (
        main(
            [
                *shlex.split(common),
                "--model_paths",
                json.dumps(paths),
                "--output_path",
                "by_path",
            ]
        )
        == 0
    )
    by_id, by_path = (
        load_file(f"{name}/epoch-0.safetensors") for name in ("by_id", "by_path")
    )
    assert by_id.keys() == by_path.keys()
    assert all(torch.equal(by_id[name], by_path[name]) for name in by_id)


@pytest.mark.parametrize(
    ("trained", "first", "second"),
    [
        (
            "--lora_base_model dit",
            {"text_encoder", "tokenizer", "vae"},
            {"transformer"},
        ),
        (
            "--trainable_models text_encoder",
            {"vae"},
            {"transformer", "text_encoder", "tokenizer"},
        ),
        (
            "--trainable_models dit,text_encoder",
            {"vae"},
            {"transformer", "text_encoder", "tokenizer"},
        ),
    ],
)
def test_with_a_feature_cache_only_the_task_changes_and_a_stage_opens_only_what_it_needs(
    trained: str, first: set[str], second: set[str], project: Path
) -> None:
    command = shlex.split(f"{SHORT} {trained}")
    model, everything = (
        project / "models/Qwen/Qwen-Image",
        {"transformer", "text_encoder", "tokenizer", "vae"},
    )
    shutil.move(model, "kept")
    assert main([*command, "--task", "sft:data_process"]) == 3
    for stage, needed in (("data_process", first), ("train", second)):
        shutil.copytree(
            "kept", model, ignore=shutil.ignore_patterns(*(everything - needed))
        )
        assert main([*command, "--task", f"sft:{stage}"]) == 0
        shutil.rmtree(model)
        shutil.rmtree("data", ignore_errors=True)
    shutil.copytree("kept", model)
    shutil.move("out", "split")
    make_data(project / "data/example_image_dataset")
    assert main([*command, "--task", "sft"]) == 0
    for path in Path("out").glob("*.safetensors"):
        unsplit, split = load_file(path), load_file(Path("split") / path.name)
        assert all(
            torch.equal(unsplit[name], split[name]) for name in (*unsplit, *split)
        )


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("data_process", "vae"),
        ("data_process", "text_encoder"),
        ("train", "transformer"),
    ],
)
def test_a_stage_without_what_it_needs_is_refused_naming_the_place(
    stage: str, part: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if stage == "train":
        assert main([*shlex.split(SHORT), "--task", "sft:data_process"]) == 0
    shutil.rmtree(project / "models/Qwen/Qwen-Image" / part)
    assert main([*shlex.split(SHORT), "--task", f"sft:{stage}"]) == 3
    assert f"Qwen-Image/{part}/" in capsys.readouterr().err
