"""How much of stage 1 goes on at the same time: its wall time beside the sum of its units.

`images`: JPEGs of 12 megapixels, of noise over gradients, with a prompt each; files are
decoded, the units of a Qwen-Image with toy encoders run, and values are written. `prompts`:
rows of the empty family, which name no files. The units are timed in the same run, one
after the other; each has one thread.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import empty_family
import numpy as np
import torch
from accelerate import Accelerator
from dstrain import Pipeline, TrainConfig
from dstrain.cache import FeatureCache, ShardWriter
from dstrain.cache.backend.index import create_cache
from dstrain.data import load_cell
from dstrain.distributed import ProcessGroup
from dstrain.runs import Setup, data_process
from dstrain.runs.long_prompts import LongPromptLog
from dstrain.runs.resolve import resolve
from dstrain.runs.stage_1.computing import compute, compute_step
from dstrain.runs.stage_1.keyed_samples import KeyedSamples, key_rows
from PIL import Image
from report import table
from train_step import write_model

SIZE = (3000, 4000)
"""(height, width) of the JPEGs."""
SCENES = 4
"""Images that are drawn; the others differ from them in a comment of the file."""
HEAD = (
    "rows",
    "decode, ms a row",
    "encode",
    "write",
    "stage 1",
    "stage 1 : sum of the units",
    "whole command, s",
)


@dataclass
class Units:
    """Seconds of the units of a stage 1, one after the other."""

    decode: float = 0.0
    encode: float = 0.0
    write: float = 0.0

    @property
    def sum(self) -> float:
        """Return the seconds of all."""
        return self.decode + self.encode + self.write


def write_images(folder: Path, rows: int, size: tuple[int, int]) -> TrainConfig:
    """Write JPEGs and a model; return the run that fills a cache with them."""
    height, width = size
    numbers = np.random.default_rng(0)
    down = np.linspace(0, 120, height)
    across = np.linspace(0, 100, width)
    scenes = []
    for scene in range(SCENES):
        gradient = np.add.outer(np.roll(down, scene * height // 8), across)
        noisy = gradient[..., None] + numbers.normal(0, 12, (height, width, 3))
        path = folder / "scene.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        scenes.append(path.read_bytes())
    path.unlink()
    lines = ["image,prompt"]
    for row in range(rows):
        scene = scenes[row % SCENES]
        # A comment follows the mark of the file's beginning, which has two bytes.
        comment = b"\xff\xfe\x00\x06%04d" % row
        (folder / f"{row}.jpg").write_bytes(scene[:2] + comment + scene[2:])
        lines.append(f"{row}.jpg,a red lake number {row}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return TrainConfig(
        model="qwen_image",
        model_paths=json.dumps(write_model(folder)),
        dataset_base_path=folder,
        feature_cache=folder / "features",
        output_path=folder / "out",
        lora_rank=8,
        max_pixels=2**16,
    )


def write_prompts(folder: Path, rows: int, size: tuple[int, int]) -> TrainConfig:
    """Write a table of prompts; return the run that fills a cache with them."""
    prompts = "".join(f"caption number {row}\n" for row in range(rows))
    (folder / "metadata.csv").write_text(f"prompt\n{prompts}")
    return TrainConfig(
        model="empty",
        model_paths=json.dumps([str(empty_family.install(folder))]),
        dataset_base_path=folder,
        feature_cache=folder / "features",
        output_path=folder / "out",
        trainable_models="dit",
    )


def loaded(config: TrainConfig) -> tuple[Setup, KeyedSamples, Pipeline]:
    """Return a stage 1 with everything that it needs before its first unit."""
    setup = resolve(replace(config, task="sft:data_process"))
    create_cache(setup.cache_path)
    keyed = key_rows(setup)
    pipeline = Pipeline.from_found(
        setup.family, setup.spec, keyed.found, setup.device, setup.dtype
    )
    return setup, keyed, pipeline


def time_units(config: TrainConfig) -> Units:
    """Do what stage 1 does, one thing after the other."""
    setup, keyed, pipeline = loaded(config)
    cache = FeatureCache.open(setup.cache_path)
    writer = ShardWriter(cache, setup.versions)
    log = LongPromptLog("truncate", setup.name_row)
    units = Units()
    clock = time.perf_counter
    for work in keyed.samples.missing_from(cache):
        start = clock()
        values: dict[str, Any] = {}
        for name in sorted(work.inputs):
            values[name] = load_cell(work.sample.cells[name])
        decoded = clock()
        for step in work.steps:
            compute_step(setup, pipeline, step, work.sample, values, log, 0)
        encoded = clock()
        for name in work.values:
            writer.add(work.sample.addresses[name], values[name])
        units.decode += decoded - start
        units.encode += encoded - decoded
        units.write += clock() - encoded
    start = clock()
    writer.flush()
    units.write += clock() - start
    return units


def time_stage_1(config: TrainConfig, processes: ProcessGroup) -> float:
    """Return the seconds of the same work done as stage 1 does it."""
    setup, keyed, pipeline = loaded(config)
    cache = FeatureCache.open(setup.cache_path)
    writer = ShardWriter(cache, setup.versions)
    log = LongPromptLog("truncate", setup.name_row)
    work = list(keyed.samples.missing_from(cache))
    start = time.perf_counter()
    compute(setup, pipeline, work, writer, log, processes)
    return time.perf_counter() - start


def measure(
    write: Callable[[Path, int, tuple[int, int]], TrainConfig],
    rows: int,
    size: tuple[int, int],
) -> tuple[str, ...]:
    """Fill three caches: unit by unit, as stage 1 does, and with all that a command does."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = write(folder, rows, size)
        processes = ProcessGroup(Accelerator(mixed_precision="no", cpu=True))
        units = time_units(replace(config, feature_cache=folder / "units"))
        wall = time_stage_1(replace(config, feature_cache=folder / "wall"), processes)
        start = time.perf_counter()
        data_process(resolve(replace(config, task="sft:data_process")), processes)
        whole = time.perf_counter() - start
    each = [units.decode, units.encode, units.write, wall]
    return (
        *(f"{1e3 * seconds / rows:.3g}" for seconds in each),
        f"{wall / units.sum:.2f}",
        f"{whole:.3g}",
    )


@click.command(help=__doc__)
@click.option("--images", default=200, show_default=True, help="Rows with an image.")
@click.option("--prompts", default=2000, show_default=True, help="Rows without.")
@click.option("--small", is_flag=True, help="Four rows each, of small images.")
def main(images: int, prompts: int, small: bool) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    size = (96, 128) if small else SIZE
    if small:
        images = prompts = 4
    rows = [
        (f"{images} images", *measure(write_images, images, size)),
        (f"{prompts} prompts", *measure(write_prompts, prompts, size)),
    ]
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
