"""What a training step costs beside the denoiser: milliseconds a step with a denoiser
of one number.

The workload `empty` is a real run of stage 2: samples read from a feature cache, the
order, noise and timesteps by counter, collation, loss, clipping, AdamW, schedule and
loss.csv. Its floor is a bare PyTorch loop on the same denoiser.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import empty_family
import torch
from dstrain import TrainConfig
from report import table
from torch import Tensor, nn
from workload import HEAD, bare_step, pairs, training

ROWS = 500


def empty_run(folder: Path) -> TrainConfig:
    """Write a dataset of captions, the denoiser's file, and the run that trains it in
    full.
    """
    captions = "".join(f"caption number {row}\n" for row in range(ROWS))
    (folder / "metadata.csv").write_text(f"prompt\n{captions}")
    return TrainConfig(
        model="empty",
        model_paths=json.dumps([str(empty_family.install(folder))]),
        dataset_base_path=folder,
        feature_cache=folder / "features",
        output_path=folder / "out",
        trainable_models="dit",
        num_epochs=1000,
    )


def predict(
    dit: nn.Module, noisy_latents: Tensor, timestep: Tensor, values: dict[str, Any]
) -> Tensor:
    """Call the denoiser."""
    prediction: Tensor = dit(noisy_latents)
    return prediction


@click.command(help=__doc__)
@click.option(
    "--pairs", "count", default=60, show_default=True, help="Pairs of blocks."
)
@click.option("--block", default=50, show_default=True, help="Steps in a block.")
def main(count: int, block: int) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        training(empty_run(Path(folder))) as (training_run, step),
    ):
        timing = pairs(step, bare_step(training_run, predict), count, block)
    print(table(HEAD, [("empty", *timing.cells())]))


if __name__ == "__main__":
    main()
