"""Whether batches make a sample cheaper whatever its prompt: seconds a sample with
`--batch_size 8` beside those with 1.

A LoRA on the Qwen-Image transformer of `train_step.py`, on images of 64x64 pixels, so that
prompts are most of what it computes; three mixes of prompts, and images of mixed sizes
in buckets. The floor is batch 1, which pads nothing.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import click
import torch
from dstrain import TrainConfig
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


@dataclass(frozen=True)
class Mix:
    """What the rows of a dataset are drawn from."""

    words: tuple[int, int]
    """Least and greatest number of words of a prompt."""
    sides: tuple[int, int] = (SIDE, SIDE)
    """Least and greatest height and width of an image, in pixels."""
    resolution: str | None = None
    """--resolution; None leaves images their sizes."""


MIXES = MappingProxyType(
    {
        "5 to 194 words": Mix((5, 194)),
        "5 to 15 words": Mix((5, 15)),
        "150 to 194 words": Mix((150, 194)),
        "5 to 15 words, images of mixed sizes": Mix((5, 15), (64, 256), "64"),
        "5 to 194 words, images of mixed sizes at two resolutions": Mix(
            (5, 194), (64, 256), "64,96"
        ),
    }
)
HEAD = (
    "rows",
    "groups",
    "padding of batches of 8",
    "batches that are full",
    "batch 8 : batch 1, seconds a sample",
)


def write_rows(folder: Path, rows: int, mix: Mix) -> None:
    """Write images, each of a size that is drawn, with a prompt of words that are."""
    draw = random.Random(1)
    lines = ["image,prompt"]
    for row in range(rows):
        size = (draw.randint(*mix.sides), draw.randint(*mix.sides))
        image = Image.effect_noise(size, 10 + row).convert("RGB")
        image.save(folder / f"{row}.png")
        prompt = " ".join(draw.choice(WORDS) for _ in range(draw.randint(*mix.words)))
        lines.append(f"{row}.png,{prompt}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


@contextmanager
def runs(mix: Mix, rows: int) -> Iterator[list[tuple[TrainingRun, Step]]]:
    """Yield two runs on the same rows and the same cache: of batches of 1, and of 8."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_rows(folder, rows, mix)
        config = TrainConfig(
            model="qwen_image",
            model_paths=json.dumps(write_model(folder)),
            dataset_base_path=folder,
            feature_cache=folder / "features",
            output_path=folder / "one",
            num_epochs=1000,
            lora_rank=8,
            resolution=mix.resolution,
        )
        more = replace(config, output_path=folder / "many", batch_size=BATCH)
        with training(config) as one, training(more) as many:
            yield [one, many]


def measure(mix: Mix, rows: int, epochs: int) -> tuple[str, ...]:
    """Time epochs of both runs in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with runs(mix, rows) as both:
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
    for batch in run.micro_batches(0, 0):
        lengths = [
            run.data.source.sample(key.row, key.chunk).values["prompt_emb"].shape[1]
            for key in batch.keys
        ]
        tokens += sum(lengths)
        places += max(lengths) * len(lengths)
        full += len(lengths) == BATCH
        count += 1
    return 1 - tokens / places, full / count


@click.command(help=__doc__)
@click.option("--epochs", default=5, show_default=True, help="Pairs of epochs.")
@click.option(
    "--small", is_flag=True, help="Eight rows of two mixes, and one pair of epochs."
)
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
    mixes = [*MIXES.items()]
    chosen = (mixes[0], mixes[-1]) if small else mixes
    print(table(HEAD, [(name, *measure(mix, *size)) for name, mix in chosen]))


if __name__ == "__main__":
    main()
