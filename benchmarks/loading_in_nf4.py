"""Write a network of 1 GiB in bf16, load it in nf4, and print by how many MiB the memory
of this process grew at most.

    python -m benchmarks.loading_in_nf4 FOLDER
"""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import torch
from dstrain.models import METHODS
from dstrain.models.execution import Kept, StoredLayers
from dstrain.pipeline.loading import Loader
from dstrain.plugin import Component, DiffusersNetwork, Files, ModelFamily
from safetensors.torch import save_file
from torch import nn

WIDTH, BLOCKS = 2048, 8
OUTPUTS = (1, 1, 1, 1, 4, 4, 4)
"""Of the layers of a block, in widths: attention, then what is larger."""
FAMILY = ModelFamily(
    "fam", "", "", "", ("base",), "net", MappingProxyType({}), MappingProxyType({})
)
NETWORK = DiffusersNetwork("benchmarks.loading_in_nf4:Blocks")
SECONDS = 0.005


class Blocks(nn.Module):
    """Layers of the sizes that transformers have."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        sizes = OUTPUTS * blocks
        layers = [nn.Linear(width, width * size, bias=False) for size in sizes]
        self.layers = nn.ModuleList(layers)


def anonymous_mib() -> float:
    """Return what this process holds in memory of its own; what is mapped from files is
    not counted.
    """
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


@contextmanager
def watched() -> Iterator[list[float]]:
    """Yield a list that is filled with what the process holds, every few milliseconds."""
    seen = [anonymous_mib()]
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(SECONDS):
            seen.append(anonymous_mib())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_done.set()
        thread.join()


def write(folder: Path, width: int, blocks: int) -> Files:
    """Write random weights, one in each file."""
    paths = []
    numbers = torch.randn(width, width, dtype=torch.bfloat16)
    for index, size in enumerate(OUTPUTS * blocks):
        path = folder / f"net-{width}-{index}.safetensors"
        save_file({f"layers.{index}.weight": numbers.repeat(size, 1)}, path)
        paths.append(path)
    kept = Kept((StoredLayers(METHODS["bitsandbytes_nf4"]),))
    return Files(tuple(paths), kept=kept)


def load(files: Files, width: int, blocks: int) -> nn.Module:
    """Load the network."""
    component = Component("net", NETWORK, "net", ("*.weight",))
    loader = Loader(FAMILY, component, files, torch.device("cpu"))
    configuration = SimpleNamespace(width=width, blocks=blocks)
    network: nn.Module = loader.load(configuration, torch.bfloat16)
    return network


def main(folder: Path) -> None:
    """Print the growth."""
    # What loading imports is no weight.
    load(write(folder, 64, 1), 64, 1)
    files = write(folder, WIDTH, BLOCKS)
    with watched() as seen:
        network = load(files, WIDTH, BLOCKS)
    assert {str(one.dtype) for one in network.parameters()} == {"torch.int8"}
    print(max(seen) - seen[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
