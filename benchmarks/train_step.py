"""A whole `sft:train` step beside the bare PyTorch loop on the same denoiser, at 100 ms
a step and more.

`full`: a Qwen-Image transformer of 7.7 million parameters, trained in full. `lora`: the
same with LoRA of rank 8 on the family's targets. Batches of 8 images of 128x128
pixels, read from a feature cache that toy encoders filled.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from dstrain import TrainConfig
from dstrain.plugin import ModelFamily
from dstrain.registry import load_family
from dstrain_qwen_image import model_fn
from PIL import Image
from report import table
from torch import Tensor, nn
from workload import HEAD, Timing, bare_step, pairs, training

DIT = {
    "num_layers": 6,
    "attention_head_dim": 32,
    "num_attention_heads": 6,
    "axes_dims_rope": (8, 12, 12),
}
ROWS = 64
SIDE = 128
BATCH = 8
WORKLOADS: dict[str, dict[str, Any]] = {
    "full": {"trainable_models": "dit"},
    "lora": {"lora_rank": 8},
}


def write_inputs(folder: Path) -> list[list[str]]:
    """Write images with captions, and the model; returns the model's files."""
    captions = []
    for row in range(ROWS):
        Image.effect_noise((SIDE, SIDE), 10 + row).convert("RGB").save(
            folder / f"{row}.png"
        )
        captions.append(f"{row}.png,image number {row}\n")
    (folder / "metadata.csv").write_text(f"image,prompt\n{''.join(captions)}")
    return write_model(folder)


def write_model(folder: Path) -> list[list[str]]:
    """Write a toy model with a larger transformer; returns its files."""
    family: ModelFamily = load_family("qwen_image")
    family.load("toy")(folder / "model", "base", 0, {"dit": DIT})
    parts = [
        sorted(map(str, part.glob("*.safetensors")))
        for part in sorted((folder / "model").iterdir())
    ]
    return [files for files in parts if files]


def time_step(name: str, count: int) -> Timing:
    """Time one workload."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = TrainConfig(
            model="qwen_image",
            model_paths=json.dumps(write_inputs(folder)),
            dataset_base_path=folder,
            feature_cache=folder / "features",
            output_path=folder / "out",
            batch_size=BATCH,
            num_epochs=1000,
            **WORKLOADS[name],
        )
        with training(config) as (training_run, step):
            return pairs(step, bare_step(training_run, predict), count)


def predict(
    dit: nn.Module, noisy_latents: Tensor, timestep: Tensor, values: dict[str, Any]
) -> Tensor:
    """Call the denoiser."""
    return model_fn.predict(
        noisy_latents, timestep, values["prompt_emb"], values["prompt_mask"], dit=dit
    )


@click.command(help=__doc__)
@click.option("--pairs", "count", default=30, show_default=True, help="Pairs of steps.")
@click.option(
    "--threads",
    default=2,
    show_default=True,
    help="Threads that PyTorch computes with.",
)
def main(count: int, threads: int) -> None:
    """Print a table."""
    torch.set_num_threads(threads)
    print(table(HEAD, [(name, *time_step(name, count).cells()) for name in WORKLOADS]))


if __name__ == "__main__":
    main()
