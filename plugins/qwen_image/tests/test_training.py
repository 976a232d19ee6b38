"""Training Qwen-Image at toy sizes: checkpointing, precision, previews, resuming, and what
is saved.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    GenerateConfig,
    ModelConfig,
    Pipeline,
    TrainConfig,
    TrainingModule,
    generate,
    run,
)
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.support.noise_images import noise_image
from tests.support.once import once
from tests.support.toys import opened, toy

CAPTIONS = (
    "a dog",
    "",
    "two dogs that run over a long bridge in the rain",
    "a cat",
    "dog",
    "an apple on a table",
)
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": 4, "lora_alpha": 6.0},
    "text_encoder": {"trainable_models": "text_encoder"},
    "both": {
        "trainable_models": "text_encoder",
        "lora_base_model": "dit",
        "lora_rank": 4,
    },
    "parts": {
        "trainable_models": "dit.transformer_blocks.0,text_encoder.model.language_model.layers.1"
    },
}
Start = Any


def write_data(folder: Path) -> None:
    """Write six images of two sizes, each with one to edit."""
    folder.mkdir()
    lines = ["image,prompt,edit_image"]
    for number, caption in enumerate(CAPTIONS):
        width = 32 if number % 2 else 48
        noise_image(width, 32, number).save(folder / f"{number}.png")
        noise_image(32, 64, 9 + number).save(folder / f"edit-{number}.png")
        lines.append(f"{number}.png,{caption},edit-{number}.png")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Run the toy; returns the folder of what it writes, which has the name given."""

    def begin(name: str, *module: type[TrainingModule], **changes: Any) -> Path:
        given: dict[str, Any] = {
            "variant": "base",
            "dataset_base_path": once("qwen-image-to-train", write_data),
            "output_path": tmp_path / name,
            "learning_rate": 1e-2,
            **changes,
        }
        run(TrainConfig(model="qwen_image", toy=True, **given), *module)
        return tmp_path / name

    return begin


def in_two_stages(start: Start, tmp_path: Path, **changes: Any) -> Path:
    """Run both stages one after the other; return what the second one writes."""
    for task in ("sft:data_process", "sft:train"):
        start("split", task=task, feature_cache=tmp_path / "cache", **changes)
    return tmp_path / "split"


def weights(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in folder.glob("*.safetensors")}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        same(one[name], other[name])
        if isinstance(one[name], dict)
        else torch.equal(one[name], other[name])
        for name in one
    )


def previews(folder: Path) -> dict[str, bytes]:
    paths = sorted((folder / "previews").glob("*.png"))
    return {path.name: path.read_bytes() for path in paths}


def test_a_text_encoder_that_was_trained_in_full_is_used_again(
    start: Start, tmp_path: Path
) -> None:
    """Its files have other key names than the network in memory."""
    flags = {"max_steps": 1, **TRAINED["text_encoder"]}
    out = start("out", **flags)
    saved = tmp_path / "alone.safetensors"
    shutil.copy(out / "step-1.safetensors", saved)
    folder = toy("qwen_image", "base") / "text_encoder"
    assert load_file(saved).keys() == load_file(folder / "model.safetensors").keys()
    file = ModelConfig(path=str(saved))
    shutil.copy(folder / "config.json", tmp_path)
    before = opened("qwen_image", "base").components["text_encoder"].state_dict()
    pipe = Pipeline.from_pretrained(folder.parent, [file], "base")
    after = pipe.components["text_encoder"].state_dict()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert len(moved) > 20
    assert not any(name.startswith(("lm_head", "model.visual")) for name in moved)
    again = start("second", resume_from_checkpoint=saved, **flags)
    assert not same(weights(again), weights(out))
    config = GenerateConfig(
        model="qwen_image",
        run=out,
        prompt="dog",
        output=tmp_path / "a.png",
        height=32,
        width=32,
        num_inference_steps=1,
    )
    generate(config)
    assert (tmp_path / "a.png").is_file()


def test_a_preview_of_an_editing_variant_edits_the_first_rows_image_at_its_size(
    start: Start, tmp_path: Path
) -> None:
    flags = {"variant": "edit", "max_pixels": 32 * 48, "max_steps": 1, "lora_rank": 2}
    flags |= {"preview_prompt": ("a dog",), "preview_at_start": True}
    whole = start("whole", **flags)
    assert previews(in_two_stages(start, tmp_path, **flags)) == previews(whole)
    with Image.open(whole / "previews/step-000000-0.png") as image:
        assert image.size == (48, 32)
    data = tmp_path / "data"
    shutil.copytree(once("qwen-image-to-train", write_data), data)
    first = "step-000000-0.png"
    for row, is_used in ((1, False), (0, True)):
        shutil.copy(data / "edit-5.png", data / f"edit-{row}.png")
        other = start(f"other-{row}", dataset_base_path=data, **flags)
        assert (previews(other)[first] != previews(whole)[first]) is is_used
