"""How fast values are read from a feature cache: reads a second of samples of .5 MB, in any
order, warm and cold (the system was told to forget the files).

The floors are `safe_open(...).get_tensor(...).clone()` on shards with the same tensors, and
`torch.load` of one file a sample. All are read in turn, in the same run.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from dstrain.cache import FeatureCache, ShardWriter
from dstrain.cache.addresses import packed
from dstrain.cache.backend.index import create_cache
from dstrain.storage import hash_json
from report import table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

NUMBERS = 131_072
"""The numbers in a sample, each of 4 bytes."""
A_SHARD = 256
"""Samples in a shard."""
HEAD = (
    "reads",
    "dstrain, 1/s",
    "safetensors, 1/s",
    ".pth, 1/s",
    "dstrain : safetensors",
    "dstrain : .pth",
    "bytes on disk : tensors",
)


def write(folder: Path, samples: int) -> None:
    """Write the same samples in each of the three forms."""
    create_cache(folder / "cache")
    cache = FeatureCache.open(folder / "cache")
    writer = ShardWriter(cache, {}, max_bytes=A_SHARD * NUMBERS * 4)
    for start in range(0, samples, A_SHARD):
        tensors = {}
        for number in range(start, min(start + A_SHARD, samples)):
            tensors[str(number)] = torch.randn(NUMBERS)
            writer.add(hash_json("sample", number), tensors[str(number)])
            torch.save(tensors[str(number)], folder / f"{number}.pth")
        save_file(tensors, folder / f"{start}.safetensors")
    writer.flush()
    cache.write_index()


def forget(folder: Path) -> None:
    """Tell the system to drop the bytes of all files from RAM."""
    for path in folder.rglob("*.*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def readers(folder: Path, samples: int) -> dict[str, Callable[[int], Tensor]]:
    """Open each form; return what reads a sample by its number."""
    cache = FeatureCache.open(folder / "cache")
    addresses = packed(hash_json("sample", number) for number in range(samples))
    # As stage 2 finds them, before it begins.
    places = cache.locate(addresses).tolist()
    files: list[Any] = [
        safe_open(folder / f"{start}.safetensors", "pt")
        for start in range(0, samples, A_SHARD)
    ]
    return {
        "dstrain": lambda number: cache.read_at(places[number]),
        "safetensors": lambda number: (
            files[number // A_SHARD].get_tensor(str(number)).clone()
        ),
        "pth": lambda number: torch.load(folder / f"{number}.pth", weights_only=True),
    }


@click.command(help=__doc__)
@click.option("--small", is_flag=True, help="A few samples, to see that it works.")
def main(small: bool) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    samples, rounds = (4, 1) if small else (1024, 5)
    numbers = list(range(samples))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, samples)
        opened = readers(folder, samples)
        bytes_on_disk = sum(
            path.stat().st_size for path in (folder / "cache").rglob("*.*")
        )
        for kind in ("warm", "cold"):
            rates: dict[str, list[float]] = {form: [] for form in opened}
            for turn in range(rounds + 1):
                random.Random(turn).shuffle(numbers)
                for form in rates:
                    if kind == "cold":
                        opened = {}  # mapped memory is not forgotten
                        forget(folder)
                        opened = readers(folder, samples)
                    start = time.perf_counter()
                    for number in numbers:
                        opened[form](number)
                    rates[form].append(samples / (time.perf_counter() - start))
            # The first turn verifies, and fills the RAM.
            median = {form: statistics.median(all_[1:]) for form, all_ in rates.items()}
            own = median["dstrain"]
            rows.append(
                (
                    kind,
                    *(f"{rate:,.0f}" for rate in median.values()),
                    f"{own / median['safetensors']:.2f}",
                    f"{own / median['pth']:.2f}",
                    f"{bytes_on_disk / (samples * NUMBERS * 4):.4f}",
                )
            )
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
