"""What loading a component costs: seconds, and the peak of RAM beside the bytes of its
weights, from four files and from one.

Linear layers in bf16 are loaded as a run loads a component that it keeps in bf16. The floor
copies each tensor of the same files out of mapped memory, which is the least that a loaded
network needs. Each figure is of a process of its own.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import click
import torch
from cache_rows import peak
from dstrain.pipeline.loading import Loader
from dstrain.plugin import Component, DiffusersNetwork, Files, ModelFamily
from report import table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

WIDTH = 4096
LAYERS = 64
"""2 GiB."""
SMALL = (32, 4)
"""Width and layers, to see that it works."""
HEAD = (
    "files",
    "GB",
    "dstrain, s",
    "copies, s",
    "ratio",
    "dstrain, peak RAM : weights",
    "copies, peak RAM : weights",
)


class Layers(nn.Module):
    """A network of nothing but linear layers."""

    def __init__(self, width: int, count: int) -> None:
        """Make `count` layers of `width` channels."""
        super().__init__()
        layers = [nn.Linear(width, width, bias=False) for _ in range(count)]
        self.layers = nn.ModuleList(layers)


def write(folder: Path, width: int, layers: int, files: int) -> None:
    """Write random weights into a number of files."""
    for number in range(files):
        state = {
            f"layers.{layer}.weight": torch.randn(width, width, dtype=torch.bfloat16)
            for layer in range(number, layers, files)
        }
        save_file(state, folder / f"{number}.safetensors")


def load(folder: Path, width: int, layers: int) -> nn.Module:
    """Load the network as a run does."""
    paths = tuple(sorted(folder.glob("*.safetensors")))
    family = ModelFamily(
        "fam",
        "",
        "",
        "",
        ("base",),
        "net",
        MappingProxyType({}),
        MappingProxyType({}),
        api=2,
    )
    component = Component(
        "net", DiffusersNetwork("loading:Layers"), "net", ("*.weight",)
    )
    loader = Loader(family, component, Files(paths), torch.device("cpu"))
    configuration = SimpleNamespace(width=width, count=layers)
    network: nn.Module = loader.load(configuration, torch.bfloat16)
    return network


def copy(folder: Path, width: int, layers: int) -> dict[str, Tensor]:
    """Copy each tensor of the files."""
    copied = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                copied[name] = file.get_tensor(name).clone()
    assert len(copied) == layers
    assert copied["layers.0.weight"].shape == (width, width)
    return copied


MEASURED: Mapping[str, Callable[[Path, int, int], object]] = MappingProxyType(
    {"dstrain": load, "copies": copy}
)


def measured(what: str, folder: Path, width: int, layers: int) -> tuple[float, float]:
    """Load in a process of its own; return seconds, and MB of RAM."""
    command = [sys.executable, __file__, "--measure", what, "--folder", str(folder)]
    size = ["--width", str(width), "--layers", str(layers)]
    done = subprocess.run([*command, *size], check=True, capture_output=True, text=True)
    seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
    return seconds, megabytes


def row(files: int, width: int, layers: int, rounds: int) -> tuple[str, ...]:
    """Return a line of the table."""
    megabytes = layers * width * width * 2 / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, width, layers, files)
        runs = [
            {what: measured(what, folder, width, layers) for what in MEASURED}
            for _ in range(rounds)
        ]
    least = {
        what: tuple(map(min, zip(*(run[what] for run in runs), strict=True)))
        for what in MEASURED
    }
    own, floor = least["dstrain"], least["copies"]
    return (
        str(files),
        f"{megabytes / 1e3:.2f}",
        f"{own[0]:.2f}",
        f"{floor[0]:.2f}",
        f"{own[0] / floor[0]:.2f}",
        f"{own[1] / megabytes:.2f}",
        f"{floor[1] / megabytes:.2f}",
    )


@click.command(help=__doc__)
@click.option(
    "--rounds", default=3, show_default=True, help="Of which the least count."
)
@click.option("--small", is_flag=True, help="A small network, once.")
@click.option("--width", default=WIDTH, show_default=True, help="Channels of a layer.")
@click.option("--layers", default=LAYERS, show_default=True, help="Number of layers.")
@click.option("--measure", type=click.Choice(list(MEASURED)), hidden=True)
@click.option("--folder", type=Path, hidden=True)
def main(
    rounds: int,
    small: bool,
    width: int,
    layers: int,
    measure: str | None,
    folder: Path | None,
) -> None:
    """Print a table."""
    if measure is not None and folder is not None:
        # What loading imports is no weight.
        with tempfile.TemporaryDirectory() as name:
            write(Path(name), *SMALL, 1)
            MEASURED[measure](Path(name), *SMALL)
        before = peak()
        since = time.perf_counter()
        kept = MEASURED[measure](folder, width, layers)
        seconds = time.perf_counter() - since
        print(json.dumps([seconds, peak() - before]))
        del kept
        return
    if small:
        rounds, (width, layers) = 1, SMALL
    lines = [row(files, width, layers, rounds) for files in (4, 1)]
    print(table(HEAD, lines))


if __name__ == "__main__":
    main()
