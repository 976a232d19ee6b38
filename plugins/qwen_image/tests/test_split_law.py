"""Unsplit equals data_process then train: the same losses and gradients, bit for bit, in fp32 on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from dstrain.config import TrainConfig
from dstrain.data_process import data_process
from dstrain.module import Batch, TrainingModule
from dstrain.order import deal
from dstrain.randomness import SampleKey
from dstrain.setup import resolve
from dstrain.train import Feed, feed, prepare
from dstrain.world import World
from PIL import Image
from torch import Tensor

CAPTIONS = ("a dog", "", "two dogs that run over a long bridge in the rain", "a dog")
TRAINED = {
    "dit-LoRA": {"lora_base_model": "dit", "lora_rank": 4, "lora_alpha": 8.0},
    "dit": {"trainable_models": "dit"},
    "text_encoder": {"trainable_models": "text_encoder"},
    "dit + text_encoder": {"trainable_models": "dit,text_encoder"},
    "LoRA in the text_encoder": {"lora_base_model": "text_encoder", "lora_rank": 4},
    "part of the dit": {"trainable_models": "dit.transformer_blocks.0"},
}
DROPS_OUT = ("text_encoder", "dit + text_encoder", "LoRA in the text_encoder")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pictures of one size with captions of several lengths, one of them twice."""
    folder = tmp_path_factory.mktemp("data")
    pixels = np.random.default_rng(0).integers(0, 256, (len(CAPTIONS), 64, 32, 3), dtype=np.uint8)
    lines = ["image,prompt"]
    for i, (picture, caption) in enumerate(zip(pixels, CAPTIONS, strict=True)):
        Image.fromarray(picture).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{caption}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(params=TRAINED)
def config(request: pytest.FixtureRequest, toy_folder: Path, data: Path, tmp_path: Path) -> TrainConfig:
    files = [sorted((toy_folder / part).glob("*.safetensors")) for part in ("transformer", "text_encoder", "vae")]
    paths = "[" + ", ".join("[" + ", ".join(f'"{file}"' for file in group) + "]" for group in files) + "]"
    return TrainConfig(
        model="qwen_image",
        model_paths=paths,
        dataset_base_path=data,
        dataset_repeat=3,
        feature_cache=tmp_path,
        output_path=tmp_path / "out",
        **TRAINED[request.param],
    )


def ready(config: TrainConfig) -> tuple[TrainingModule, Feed, Any]:
    """The module a run of this configuration trains, its samples and their order."""
    setup, world = resolve(config), World(Accelerator(cpu=True))
    samples = feed(setup, world)
    job = prepare(setup, world, samples, TrainingModule)
    with torch.no_grad():
        for name, parameter in job.module.trained.parameters.items():
            if "lora_B" in name:  # zero at first, and then the gradients of lora_A are zero too
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    return job.module, samples, job.order


def split_and_unsplit(config: TrainConfig) -> Iterator[tuple[TrainingModule, Feed, Any]]:
    """Fill the store, then what each way of running trains."""
    data_process(resolve(replace(config, task="sft:data_process")), World(Accelerator(cpu=True)))
    yield ready(config)
    yield ready(replace(config, task="sft:train"))


def losses_and_gradients(
    module: TrainingModule, samples: Feed, order: Any, batch_size: int
) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    """The loss and every gradient of the first micro-batches, without an update between them."""
    seen = []
    batches = replace(order, size=batch_size).global_batches(epoch=0)
    for keys, _ in zip(batches, range(2), strict=False):
        (micro,) = deal(keys, batch_size, rank=0, world=1)
        assert len(micro.keys) == batch_size
        module.zero_grad(set_to_none=True)
        loss = module(Batch(micro, [samples.source.sample(key.row) for key in micro.keys]))
        loss.backward()
        seen.append((loss.detach(), {name: p.grad for name, p in module.trained.parameters.items()}))
    return seen


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_losses_and_gradients_are_bit_equal_to_the_unsplit_ones(config: TrainConfig, batch_size: int) -> None:
    unsplit, split = (losses_and_gradients(*way, batch_size) for way in split_and_unsplit(config))
    for (loss, gradients), (other_loss, other_gradients) in zip(unsplit, split, strict=True):
        assert torch.equal(loss, other_loss)
        assert gradients.keys() == other_gradients.keys()
        assert [name for name in gradients if not same(gradients[name], other_gradients[name])] == []
        assert sum(g is not None and bool(g.abs().sum() > 0) for g in gradients.values()) > len(gradients) / 2


def test_dropout_acts_in_what_is_trained_and_only_there(config: TrainConfig, request: pytest.FixtureRequest) -> None:
    """The first key of a batch seeds its dropout; another one there changes the other samples' losses, or does not."""
    drops_out = request.node.callspec.params["config"] in DROPS_OUT
    for module, samples, _ in split_and_unsplit(config):
        keys = [SampleKey(0, 0, 0, row) for row in range(4)]
        changed = [keys[0]._replace(repeat=1), *keys[1:]]
        rows = [samples.source.sample(row) for row in range(4)]
        losses = [module.losses(rows, keys), module.losses(rows, keys), module.losses(rows, changed)]
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[0][1:], losses[2][1:]) is not drops_out
