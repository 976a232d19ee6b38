"""DiffSynth-Studio's commands for FLUX resolve as they are: only the program's name is
ours. Those for models that no variant is for are refused by name.
"""

import csv
import shlex
from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain_flux import DEV, OWNER, SHARED

from tests.support import everyday

TARGETS = (
    "a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,"
    "norm.linear,norm1_a.linear,norm1_b.linear,to_qkv_mlp"
)
LORA = f"""--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt pipe.dit. --lora_base_model dit
    --lora_target_modules "{TARGETS}" --lora_rank 32 --align_to_opensource_format"""
FULL = "--learning_rate 1e-5 --num_epochs 1 --remove_prefix_in_ckpt pipe.{}. --trainable_models {}"
TEXT_AND_VAE = ",".join(SHARED.values())
ON_DEV = f"{DEV}:flux1-dev.safetensors,{TEXT_AND_VAE}"
FILL = ",".join(
    f"{OWNER}/FLUX.1-Fill-dev:{file}"
    for file in (
        "flux1-fill-dev.safetensors",
        "text_encoder/model.safetensors",
        "text_encoder_2/*.safetensors",
        "ae.safetensors",
    )
)
REDUX = f"{OWNER}/FLUX.1-Redux-dev"
REDUX_FILES = f"{REDUX}:image_encoder/model.safetensors,{REDUX}:image_embedder/diffusion_pytorch_model.safetensors"
CONTROLNET = "diffusion_pytorch_model.safetensors"
UNION = f"InstantX/FLUX.1-dev-Controlnet-Union-alpha:{CONTROLNET}"
UPSCALER = f"jasperai/Flux.1-dev-Controlnet-Upscaler:{CONTROLNET}"
INPAINT = f"alimama-creative/FLUX.1-dev-Controlnet-Inpainting-Beta:{CONTROLNET}"
IP_ADAPTER = (
    "InstantX/FLUX.1-dev-IP-Adapter:ip-adapter.bin,"
    "google/siglip-so400m-patch14-384:model.safetensors"
)
MODE = "controlnet_processor_id"
ENTITIES = "eligen_entity_masks,eligen_entity_prompts"
CELLS = {
    "prompt": "a dog",
    MODE: "canny",
    "eligen_entity_masks": '["a.png"]',
    "eligen_entity_prompts": '["a dog"]',
}
"""What is in a row; other columns name a file."""
# Files, columns beside image and prompt, what is trained, and the variant.
COMMANDS = [
    (ON_DEV, "", "", "dev"),
    (
        f"{OWNER}/FLUX.1-Krea-dev:flux1-krea-dev.safetensors,{TEXT_AND_VAE}",
        "",
        "",
        "dev",
    ),
    (
        f"{OWNER}/FLUX.1-Kontext-dev:flux1-kontext-dev.safetensors,{TEXT_AND_VAE}",
        "kontext_images",
        "",
        "kontext",
    ),
    (FILL, "flux_fill_image,flux_fill_mask", "dit", "fill"),
    (f"{ON_DEV},{UPSCALER}", "controlnet_image", "controlnet", "controlnet"),
    (f"{ON_DEV},{UNION}", f"controlnet_image,{MODE}", "", "controlnet-union"),
    (f"{ON_DEV},{UNION}", f"controlnet_image,{MODE}", "controlnet", "controlnet-union"),
    (
        f"{ON_DEV},{INPAINT}",
        "controlnet_image,controlnet_inpaint_mask",
        "controlnet",
        "controlnet-inpaint",
    ),
    (f"{ON_DEV},{REDUX_FILES}", "flux_redux_image", "dit", "redux"),
    (ON_DEV, ENTITIES, "", "eligen"),
    (
        f"{OWNER}/FLUX.1-schnell:flux1-schnell.safetensors,{TEXT_AND_VAE}",
        "",
        "",
        "schnell",
    ),
    (f"{ON_DEV},{IP_ADAPTER}", "ipadapter_images", "", "ip-adapter"),
    (f"{ON_DEV},{IP_ADAPTER}", "ipadapter_images", "ipadapter", "ip-adapter"),
]
# Files, columns beside image and prompt, and the name.
REFUSED = [
    (
        f"ostris/Flex.2-preview:Flex.2-preview.safetensors,{TEXT_AND_VAE}",
        "",
        "Flex.2-preview",
    ),
    (
        f"{ON_DEV},DiffSynth-Studio/AttriCtrl-FLUX.1-Dev:models/brightness.safetensors",
        "value_controller_inputs",
        "AttriCtrl",
    ),
    (
        f"{ON_DEV},ByteDance/InfiniteYou:infu_flux_v1.0/aes_stage2/image_proj_model.bin",
        "controlnet_image,infinityou_id_image,infinityou_guidance",
        "InfiniteYou",
    ),
    (
        f"{ON_DEV},DiffSynth-Studio/LoRA-Encoder-FLUX.1-Dev:model.safetensors",
        "lora_encoder_inputs",
        "LoRA-Encoder",
    ),
    (
        f"{FILL},{REDUX_FILES}",
        "insert_anything_source_image,insert_anything_ref_image",
        "Insert Anything",
    ),
    (
        f"DiffSynth-Studio/Nexus-GenV2:model*.safetensors,{TEXT_AND_VAE}",
        "nexus_gen_reference_image",
        "Nexus-Gen",
    ),
    (
        "Qwen/Qwen2.5-VL-7B-Instruct:model-*.safetensors,stepfun-ai/Step1X-Edit:vae.safetensors",
        "step1x_reference_image",
        "Step1X-Edit",
    ),
]


def command(files: str, columns: str, trained: str, folder: Path) -> list[str]:
    """The words of a command, for a dataset that is written."""
    names = [name for name in columns.split(",") if name]
    row = {name: CELLS.get(name, "a.png") for name in ("image", "prompt", *names)}
    with (folder / "metadata.csv").open("w") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    paths = ",".join(name for name, cell in row.items() if "a.png" in cell)
    prefix = "controlnet.models.0" if trained == "controlnet" else trained
    way = FULL.format(prefix, trained) if trained else LORA
    extra = f"--extra_inputs {columns}" if columns else ""
    return shlex.split(
        f"""--model flux --dataset_base_path {folder} --dataset_metadata_path {folder}/metadata.csv
        --data_file_keys {paths} --max_pixels 1048576 --dataset_repeat 100 {extra}
        --model_id_with_origin_paths "{files}" --output_path out {way}
        --use_gradient_checkpointing --dry_run"""
    )


@pytest.fixture(autouse=True)
def without_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of models of this size takes seconds to count."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("is not counted")

    monkeypatch.setattr("dstrain.runs.memory.facts.count_activations", refuse)


@pytest.mark.parametrize(
    ("files", "columns", "trained", "variant"),
    everyday.cases(COMMANDS, lambda row: row[3] in ("dev", "controlnet-union")),
    ids=[f"{row[3]}-{row[2] or 'lora'}" for row in COMMANDS],
)
def test_the_commands_of_the_documents_mean_the_variant(
    files: str,
    columns: str,
    trained: str,
    variant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command(files, columns, trained, tmp_path)) == 0
    printed = capsys.readouterr().out
    assert f"flux {variant}, task sft, trains {trained or 'dit'}\n" in printed


@pytest.mark.parametrize(
    ("files", "columns", "model"), REFUSED, ids=[row[2] for row in REFUSED]
)
def test_the_commands_for_other_models_are_refused_by_name(
    files: str,
    columns: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command(files, columns, "", tmp_path)) == 2
    assert f"{model} is not supported yet by flux" in capsys.readouterr().err
