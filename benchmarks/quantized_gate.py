"""What storing a base in fewer bytes costs a LoRA: the demo's digits in a new look,
trained on bases in bf16, fp8, int8 and nf4.

The demo's small Qwen-Image is trained in full on digits once. Then a LoRA of the look is
trained on it for each method and seed, and judged on digits of writers that no training
saw: the mean loss, and the share of generated digits that the demo's judge reads right in
the look's colours.
"""

import csv
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from accelerate import Accelerator
from dstrain.config.options.generate import GenerateConfig
from dstrain.config.options.train import TrainConfig
from dstrain.config.serialize import with_run_options
from dstrain.distributed.world import ProcessGroup
from dstrain.generation.run import start as generate
from dstrain.randomness import SampleKey
from dstrain.runs.build import open_training_data, prepare
from dstrain.runs.resolve import resolve
from dstrain.runs.runner import run
from dstrain.training.module import TrainingModule
from PIL import Image
from report import table

DEMO = Path(__file__).parents[1] / "demo"
METHODS: Mapping[str, str | None] = MappingProxyType(
    {
        "bf16": None,
        "int8_block": "dit:int8_block",
        "fp8": "dit:fp8",
        "nf4": "dit:bitsandbytes_nf4",
    }
)
"""Name in the table -> --quant_options."""
HEAD = (
    "base",
    "held-out loss, mean over seeds",
    "least and most",
    "read right, of 100",
    "least and most",
)
HELD_OUT = 64
"""Digits of other writers whose loss is measured, each with four draws of noise."""
DRAWS = 4
INFERENCE_STEPS = 20


def train_config(out: Path, weights: list[str], **more: Any) -> TrainConfig:
    """Return a run on the demo's model with these weights of the denoiser."""
    model = out / "model"
    encoders = [
        str(model / "text_encoder/model.safetensors"),
        str(model / "vae/diffusion_pytorch_model.safetensors"),
    ]
    return TrainConfig(
        model="qwen_image",
        model_paths=json.dumps([weights, *encoders]),
        mixed_precision="bf16",
        loss_weighting="none",
        **more,
    )


def two_stages(config: TrainConfig) -> None:
    """Run both stages of a configuration."""
    for stage in ("data_process", "train"):
        run(replace(config, task=f"sft:{stage}"))


def held_out_loss(config: TrainConfig, data: Path, lora: Path) -> float:
    """Return the mean loss of a LoRA on the rows of a dataset, without training."""
    given = replace(
        config,
        dataset_base_path=data,
        lora_checkpoint=lora,
        task="sft",
        feature_cache=None,
        seed=0,
    )
    setup = resolve(given)
    samples = open_training_data(setup)
    processes = ProcessGroup(Accelerator(cpu=True))
    module = prepare(setup, processes, samples, TrainingModule).module.eval()
    losses = []
    with torch.no_grad():
        for row in range(len(samples.groups)):
            sample = samples.source.sample(row)
            for draw in range(DRAWS):
                losses.append(module.losses([sample], [SampleKey(1, draw, 0, row)]))
    return float(torch.cat(losses).mean())


def read_right(folder: Path, run_folder: Path, each: int, judge: Any) -> float:
    """Return the share of generated digits that the demo's judge reads right and that
    are in the look.
    """
    from digits import LOOK, caption, in_look

    prompts = folder / "prompts.jsonl"
    rows = [
        {"prompt": caption(digit, LOOK), "seed": seed}
        for digit in range(10)
        for seed in range(each)
    ]
    folder.mkdir(parents=True)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    generate(
        with_run_options(
            GenerateConfig(
                model="qwen_image",
                run=run_folder,
                dataset=prompts,
                output=folder / "images",
                height=64,
                width=64,
                num_inference_steps=INFERENCE_STEPS,
                guidance_scale=1.0,
            )
        )
    )
    made = folder / "images"
    with (made / "metadata.csv").open(encoding="utf-8", newline="") as file:
        images = [Image.open(made / row["image"]) for row in csv.DictReader(file)]
    digits = [digit for digit in range(10) for _ in range(each)]
    right = judge.read(images) == digits
    looks = [in_look(image, LOOK) for image in images]
    return statistics.fmean(
        bool(one) and look for one, look in zip(right, looks, strict=True)
    )


def base_of(out: Path, demo: Path | None, full_steps: int) -> list[str]:
    """Return the files of the base: those that `make demo` left, or else trained here."""
    if demo is not None:
        (out / "model").symlink_to((demo / "model").resolve())
        return [str(next((demo / "full").glob("step-*.safetensors")))]
    from model import main as write_model

    write_model.main([str(out / "model")], standalone_mode=False)
    shards = sorted(map(str, (out / "model/transformer").glob("*.safetensors")))
    full = train_config(
        out,
        shards,
        dataset_base_path=out / "digits",
        feature_cache=out / "cache",
        output_path=out / "full",
        trainable_models="dit",
        learning_rate=1e-3,
        batch_size=64,
        lr_scheduler="cosine",
        lr_warmup_steps=min(50, full_steps // 2),
        max_steps=full_steps,
        save_steps=full_steps,
    )
    # The base is that of `make demo`, in fp32: only what LoRA is trained on is stored.
    two_stages(replace(full, mixed_precision="no"))
    return [str(out / f"full/step-{full_steps}.safetensors")]


def rows_of(
    out: Path,
    demo: Path | None,
    full_steps: int,
    lora_steps: int,
    seeds: int,
    each: int,
    count: int,
) -> Iterator[tuple[str, ...]]:
    """Train and judge; yield the rows of the table."""
    sys.path.insert(0, str(DEMO))
    from digits import LOOK, LOOK_IMAGES, TRAIN, Judge, caption, paint, strokes, write

    judge = Judge()
    write(out / "digits", count=min(TRAIN, count))
    write(out / "look", LOOK, min(LOOK_IMAGES, count))
    held = out / "held-out"
    held.mkdir()
    images, digits = strokes()
    lines = ["image,prompt"]
    for index in range(TRAIN, TRAIN + min(HELD_OUT, count)):
        name = f"{index}.png"
        paint(images[index], LOOK).save(held / name)
        lines.append(f'{name},"{caption(digits[index], LOOK)}"')
    (held / "metadata.csv").write_text("\n".join(lines) + "\n")
    base = base_of(out, demo, full_steps)
    losses: dict[str, list[float]] = {method: [] for method in METHODS}
    shares: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed, (method, options) in product(range(seeds), METHODS.items()):
        folder = out / f"lora-{method}-{seed}"
        config = train_config(
            out,
            base,
            dataset_base_path=out / "look",
            feature_cache=out / "cache",
            output_path=folder,
            lora_base_model="dit",
            lora_rank=16,
            learning_rate=2e-3,
            batch_size=32,
            max_steps=lora_steps,
            save_steps=lora_steps,
            quant_options=options,
            seed=seed,
        )
        two_stages(config)
        lora = folder / f"step-{lora_steps}.safetensors"
        losses[method].append(held_out_loss(config, held, lora))
        judged = out / f"judged-{method}-{seed}"
        shares[method].append(100 * read_right(judged, folder, each, judge))
        found = f"loss {losses[method][-1]:.4f}, {shares[method][-1]:.0f} % read right"
        click.echo(f"{method}, seed {seed}: {found}", err=True)
    for method in METHODS:
        yield (
            method,
            f"{statistics.fmean(losses[method]):.4f}",
            f"{min(losses[method]):.4f} to {max(losses[method]):.4f}",
            f"{statistics.fmean(shares[method]):.0f}",
            f"{min(shares[method]):.0f} to {max(shares[method]):.0f}",
        )


@click.command()
@click.option("--full_steps", default=1200, show_default=True)
@click.option("--lora_steps", default=250, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--each", default=10, show_default=True, help="Images of each digit.")
@click.option("--images", default=1500, show_default=True, help="Digits to train on.")
@click.option("--demo", type=Path, help="The demo_output of `make demo`, for its base.")
def main(
    full_steps: int,
    lora_steps: int,
    seeds: int,
    each: int,
    images: int,
    demo: Path | None,
) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        rows = rows_of(out, demo, full_steps, lora_steps, seeds, each, images)
        click.echo(table(HEAD, list(rows)))


if __name__ == "__main__":
    main()
