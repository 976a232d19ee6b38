"""Previews of Qwen-Image at toy sizes: guided, with images to be edited, and the same
in both ways of training.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import TrainConfig, run
from dstrain.runs.reports.preview_plans import plan_previews
from dstrain.runs.resolve import resolve
from PIL import Image
from safetensors.torch import load_file

PREVIEWS: dict[str, Any] = {
    "preview_prompt": ("a dog on a bridge",),
    "preview_steps": 2,
}
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": 2},
    "text_encoder": {"trainable_models": "text_encoder"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images, each with one to be edited."""
    folder = tmp_path_factory.mktemp("data")
    numbers = np.random.default_rng(0)
    for name in ("a", "b", "edit_a", "edit_b"):
        shape = (64, 32, 3) if name == "edit_a" else (32, 48, 3)
        Image.fromarray(numbers.integers(0, 256, shape, np.uint8)).save(
            folder / f"{name}.png"
        )
    lines = (
        "image,prompt,edit_image",
        "a.png,a dog,edit_a.png",
        "b.png,a cat,edit_b.png",
    )
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def train(data: Path, tmp_path: Path) -> Callable[..., Path]:
    """Run a variant's toy for two steps; returns the output folder, named by `name`."""

    def make(name: str, **changes: Any) -> Path:
        out = tmp_path / name
        given = {
            "variant": "base",
            "learning_rate": 1e-2,
            "dataset_base_path": data,
            "output_path": out,
            **changes,
        }
        run(TrainConfig(model="qwen_image", toy=True, max_steps=2, **given))
        return out

    return make


def made(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted((folder / "previews").glob("*.png"))
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "epoch-0.safetensors")


@pytest.mark.parametrize("name", TRAINED)
def test_previews_are_equal_split_and_unsplit_and_leave_training_as_it_is(
    name: str, train: Callable[..., Path], tmp_path: Path
) -> None:
    flags = {"height": 32, "width": 32, **TRAINED[name]}
    without = weights(train("without", **flags))
    whole = train("whole", **PREVIEWS, **flags)
    for task in ("sft:data_process", "sft:train"):
        train("split", task=task, feature_cache=tmp_path / "cache", **PREVIEWS, **flags)
    assert list(made(whole)) == [f"step-00000{step}-0.png" for step in (0, 2)]
    assert made(whole) == made(tmp_path / "split")
    assert len(set(made(whole).values())) == 2
    for folder in (whole, tmp_path / "split"):
        have = weights(folder)
        assert have.keys() == without.keys()
        assert all(torch.equal(have[key], without[key]) for key in have)


def test_a_preview_of_an_editing_variant_edits_the_first_rows_image_at_its_size(
    train: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    flags = {"variant": "edit", "lora_rank": 2, "max_pixels": 32 * 48, **PREVIEWS}
    whole = made(train("whole", **flags))
    for task in ("sft:data_process", "sft:train"):
        train("split", task=task, feature_cache=tmp_path / "cache", **flags)
    assert made(tmp_path / "split") == whole
    with Image.open(tmp_path / "whole/previews/step-000000-0.png") as image:
        assert image.size == (48, 32)
    asked = TrainConfig(
        model="qwen_image",
        toy=True,
        dataset_base_path=data,
        output_path=tmp_path,
        **flags,
    )
    (preview,) = plan_previews(resolve(asked))
    assert preview.cells["edit_image"].files == (str(data / "edit_a.png"),)
