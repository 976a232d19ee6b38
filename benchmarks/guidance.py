"""What caption dropout does for guidance: the demo's small Qwen-Image trained on digits
with and without it, and asked for digits at several scales of guidance.

Both are stopped early, while they still confuse digits: a model that is always right has
nothing to gain from guidance. Without dropout the empty prompt that guidance compares
with was never trained.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from on_digits import (
    DEMO,
    asked_for,
    generated,
    model_files,
    of_base,
    train_config,
    two_stages,
)
from report import table

DROPOUTS: Mapping[str, float] = MappingProxyType(
    {"no caption dropout": 0.0, "--caption_dropout 0.15": 0.15}
)
"""Name in the table -> probability of an empty caption."""
SCALES = (1.0, 1.5, 2.0, 4.0)
"""Scales of guidance; 1 is none."""


def trained(out: Path, dropout: float, steps: int, seed: int) -> list[str]:
    """Train the demo's model in full on its digits; return the file of its denoiser."""
    shards = sorted(map(str, (out / "model/transformer").glob("*.safetensors")))
    folder = out / f"full-{dropout}-{seed}"
    config = train_config(
        out,
        shards,
        dataset_base_path=out / "digits",
        feature_cache=out / "cache",
        output_path=folder,
        trainable_models="dit",
        caption_dropout=dropout,
        seed=seed,
        **of_base(steps),
    )
    two_stages(config)
    return [str(folder / f"step-{steps}.safetensors")]


def rows_of(
    out: Path, steps: int, seeds: int, each: int, count: int
) -> Iterator[tuple[str, ...]]:
    """Train and judge; yield the rows of the table."""
    sys.path.insert(0, str(DEMO))
    from digits import TRAIN, Judge, caption, write
    from model import main as write_model

    judge: Any = Judge()
    write(out / "digits", count=min(TRAIN, count))
    write_model.main([str(out / "model")], standalone_mode=False)
    prompts = [caption(digit) for digit in range(10)]
    for name, dropout in DROPOUTS.items():
        shares: dict[float, list[float]] = {scale: [] for scale in SCALES}
        for seed in range(seeds):
            weights = trained(out, dropout, steps, seed)
            for scale in SCALES:
                # Without guidance a negative prompt would be refused as unused.
                negative = {"negative_prompt": ""} if scale > 1 else {}
                images = generated(
                    out / f"judged-{dropout}-{seed}-{scale}",
                    prompts,
                    each,
                    scale,
                    model_paths=model_files(out, weights),
                    **negative,
                )
                right = judge.accuracy(images, asked_for(each))
                shares[scale].append(100 * right)
                click.echo(f"{name}, seed {seed}, {scale}: {100 * right:.0f}", err=True)
        cells = [
            f"{statistics.fmean(found):.0f} ({min(found):.0f} to {max(found):.0f})"
            for found in shares.values()
        ]
        yield (name, *cells)


@click.command()
@click.option("--steps", default=220, show_default=True, help="Training steps.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--each", default=10, show_default=True, help="Images of each digit.")
@click.option("--images", default=1500, show_default=True, help="Digits to train on.")
def main(steps: int, seeds: int, each: int, images: int) -> None:
    """Print the table."""
    head = ("read right, of 100, at scale", *(f"{scale:g}" for scale in SCALES))
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(Path(folder), steps, seeds, each, images)
        click.echo(table(head, list(rows)))


if __name__ == "__main__":
    main()
