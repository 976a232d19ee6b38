"""What benchmarks on the demo's digits share: runs on the demo's small Qwen-Image, its
images, and losses on digits that no training saw.
"""

import csv
import inspect
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from accelerate import Accelerator
from dstrain import GenerateConfig, SampleKey, TrainConfig, TrainingModule, run
from dstrain.config import with_run_options
from dstrain.distributed import ProcessGroup
from dstrain.generation.run import start as generate
from dstrain.runs import open_training_data, prepare
from dstrain.runs.resolve import resolve
from PIL import Image
from report import table

DEMO = Path(__file__).parents[1] / "demo"
SIDE = 64
"""Height and width of every image, in pixels."""
HELD_OUT = 64
"""Digits of other writers whose loss is measured, each with four draws of noise."""
DRAWS = 4
INFERENCE_STEPS = 20
OPTIONS = (
    click.Option(["--full_steps"], default=1200, show_default=True),
    click.Option(["--lora_steps"], default=250, show_default=True),
    click.Option(["--seeds"], default=3, show_default=True),
    click.Option(
        ["--each"], default=10, show_default=True, help="Images of each digit."
    ),
    click.Option(
        ["--images", "count"],
        default=1500,
        show_default=True,
        help="Digits to train on.",
    ),
    click.Option(
        ["--demo"], type=Path, help="The demo_output of `make demo`, for its base."
    ),
)
"""What trials of LoRAs take, most of them."""


def lora_trials(
    head: Sequence[str], rows_of: Callable[..., Iterator[tuple[str, ...]]]
) -> click.Command:
    """Return the command that prints the table of a benchmark.

    Args:
        head: Its head.
        rows_of: Yields its rows, from a folder and those of `OPTIONS` that it takes.
    """

    def run(**given: Any) -> None:
        with TemporaryDirectory() as folder:
            click.echo(table(head, list(rows_of(Path(folder), **given))))

    taken = inspect.signature(rows_of).parameters
    params: list[click.Parameter] = [one for one in OPTIONS if one.name in taken]
    return click.Command(None, params=params, callback=run, help="Print the table.")


def model_files(out: Path, weights: list[str]) -> str:
    """Return --model_paths of the demo's model with these weights of the denoiser."""
    model = out / "model"
    encoders = [
        str(model / "text_encoder/model.safetensors"),
        str(model / "vae/diffusion_pytorch_model.safetensors"),
    ]
    return json.dumps([weights, *encoders])


def train_config(out: Path, weights: list[str], **more: Any) -> TrainConfig:
    """Return a run on the demo's model with these weights of the denoiser."""
    given = {"mixed_precision": "bf16", "loss_weighting": "none"} | more
    return TrainConfig(
        model="qwen_image", model_paths=model_files(out, weights), **given
    )


def of_base(steps: int) -> dict[str, Any]:
    """Return how `make demo` trains its base, in so many steps."""
    return {
        "mixed_precision": "no",
        "loss_weighting": "none",
        "learning_rate": 1e-3,
        "batch_size": 64,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": min(50, steps // 2),
        "max_steps": steps,
        "save_steps": steps,
    }


def of_lora(steps: int) -> dict[str, Any]:
    """Return how `make demo` trains its LoRA, in so many steps."""
    return {
        "loss_weighting": "none",
        "lora_rank": 16,
        "learning_rate": 2e-3,
        "batch_size": 32,
        "max_steps": steps,
        "save_steps": steps,
    }


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


def asked_for(each: int) -> list[int]:
    """Return the digits that `generated` was asked for, in its order."""
    return [digit for digit in range(10) for _ in range(each)]


def share(images: Sequence[Image.Image], each: int, style: Any, judge: Any) -> float:
    """Return how many of 100 images show the digit asked for in a style."""
    from digits import in_look

    right = judge.read(images) == asked_for(each)
    pairs = zip(right, images, strict=True)
    return 100 * statistics.fmean(
        bool(one) and in_look(image, style) for one, image in pairs
    )


def generated(
    folder: Path,
    prompts: Sequence[str],
    each: int,
    guidance_scale: float = 1.0,
    first_seed: int = 0,
    model: str = "qwen_image",
    **more: Any,
) -> list[Image.Image]:
    """Return images of each of the prompts, with as many seeds.

    Args:
        folder: Gets the table of prompts, and the images as a dataset below `images`.
        prompts: What is asked for, in order.
        each: Images of each prompt.
        guidance_scale: Scale of classifier-free guidance; 1 is none.
        first_seed: Seed of the first image of each prompt.
        model: Family of the model.
        more: Further options of `dstrain generate`.
    """
    table = folder / "prompts.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": prompt, "seed": seed}
        for prompt in prompts
        for seed in range(first_seed, first_seed + each)
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = folder / "images"
    config = GenerateConfig(
        model=model,
        dataset=table,
        output=made,
        height=SIDE,
        width=SIDE,
        num_inference_steps=INFERENCE_STEPS,
        guidance_scale=guidance_scale,
        **more,
    )
    generate(with_run_options(config))
    images = []
    with (made / "metadata.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            with Image.open(made / row["image"]) as image:
                images.append(image.convert("RGB"))
    return images


def base_of(out: Path, demo: Path | None, full_steps: int) -> list[str]:
    """Return the files of the base: those that `make demo` left, or else trained here."""
    if demo is not None:
        (out / "model").symlink_to((demo / "model").resolve())
        return [str(next((demo / "full").glob("step-*.safetensors")))]
    from model import main as write_model

    write_model.main([str(out / "model")], standalone_mode=False)
    shards = sorted(map(str, (out / "model/transformer").glob("*.safetensors")))
    # The base is that of `make demo`, in fp32: only what LoRA is trained on is stored.
    full = train_config(
        out,
        shards,
        dataset_base_path=out / "digits",
        feature_cache=out / "cache",
        output_path=out / "full",
        trainable_models="dit",
        **of_base(full_steps),
    )
    two_stages(full)
    return [str(out / f"full/step-{full_steps}.safetensors")]
