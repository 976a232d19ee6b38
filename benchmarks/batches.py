"""Whether batches make a sample cheaper whatever its prompt: seconds a sample with
`--batch_size 8` beside those with 1.

A LoRA on the Qwen-Image transformer of `train_step.py`, on images of 64x64 pixels, so that
prompts are most of what it computes; three mixes of prompts. The floor is batch 1, which
pads nothing.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import click
import torch
from dstrain.config.options.train import TrainConfig
from dstrain.runs.loop import micro_batches
from dstrain.runs.training_run import TrainingRun
from PIL import Image
from report import table
from train_step import write_model
from workload import Step, timed, training

ROWS = 64
SIDE = 64
BATCH = 8
WORDS = ("a", "the", "on", "over", "and", "lake", "red")
"""A toy tokenizer makes of them about as many tokens as a published one of a caption."""
MIXES = MappingProxyType(
    {
        "5 to 194 words": (5, 194),
        "5 to 15 words": (5, 15),
        "150 to 194 words": (150, 194),
    }
)
HEAD = (
    "prompts",
    "groups",
    "padding of batches of 8",
    "batches that are full",
    "batch 8 : batch 1, seconds a sample",
)


def write_rows(folder: Path, rows: int, words: tuple[int, int]) -> None:
    """Write images, each with a prompt of a number of words that is drawn."""
    draw = random.Random(1)
    lines = ["image,prompt"]
    for row in range(rows):
        image = Image.effect_noise((SIDE, SIDE), 10 + row).convert("RGB")
        image.save(folder / f"{row}.png")
        prompt = " ".join(draw.choice(WORDS) for _ in range(draw.randint(*words)))
        lines.append(f"{row}.png,{prompt}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


@contextmanager
def runs(words: tuple[int, int], rows: int) -> Iterator[list[tuple[TrainingRun, Step]]]:
    """Yield two runs on the same rows and the same cache: of batches of 1, and of 8."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_rows(folder, rows, words)
        config = TrainConfig(
            model="qwen_image",
            model_paths=json.dumps(write_model(folder)),
            dataset_base_path=folder,
            feature_cache=folder / "features",
            output_path=folder / "one",
            num_epochs=1000,
            lora_rank=8,
        )
        more = replace(config, output_path=folder / "many", batch_size=BATCH)
        with training(config) as one, training(more) as many:
            yield [one, many]


def measure(words: tuple[int, int], rows: int, epochs: int) -> tuple[str, ...]:
    """Time epochs of both runs in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with runs(words, rows) as both:
        for epoch in range(-1, epochs):
            for which in (0, 1) if epoch % 2 else (1, 0):
                run, step = both[which]
                steps = run.order.steps_per_epoch
                taken = steps * timed(step, steps)
                if epoch >= 0:
                    seconds[which].append(taken)
        run, _ = both[1]
        padding, full = batches_of(run)
    ratios = [many / one for one, many in zip(*seconds, strict=True)]
    return (
        str(len(set(run.order.groups))),
        f"{padding:.0%}",
        f"{full:.0%}",
        f"{statistics.median(ratios):.2f}",
    )


def batches_of(run: TrainingRun) -> tuple[float, float]:
    """Return the share of an epoch's tokens that are padding, and of its batches that
    are full.
    """
    tokens = places = full = count = 0
    for batch in micro_batches(run, 0, 0):
        lengths = [
            run.source.sample(key.row, key.chunk).values["prompt_emb"].shape[1]
            for key in batch.keys
        ]
        tokens += sum(lengths)
        places += max(lengths) * len(lengths)
        full += len(lengths) == BATCH
        count += 1
    return 1 - tokens / places, full / count


@click.command(help=__doc__)
@click.option("--epochs", default=5, show_default=True, help="Pairs of epochs.")
@click.option("--small", is_flag=True, help="Eight rows, and one pair of epochs.")
@click.option(
    "--threads",
    default=2,
    show_default=True,
    help="Threads that PyTorch computes with.",
)
def main(epochs: int, small: bool, threads: int) -> None:
    """Print a table."""
    torch.set_num_threads(threads)
    size = (8, 1) if small else (ROWS, epochs)
    print(table(HEAD, [(name, *measure(mix, *size)) for name, mix in MIXES.items()]))


if __name__ == "__main__":
    main()
