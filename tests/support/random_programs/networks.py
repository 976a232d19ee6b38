"""The networks of random programs, and how functions read values of any kind."""

import math
import zlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dstrain import Frames
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WIDTH = 4
FLAVOURS: Mapping[str, tuple[float, bool]] = {
    "plain": (0.0, False),
    "dropout": (0.3, False),
    "norm": (0.0, True),
    "both": (0.3, True),
}
"""Name -> probability of dropout, whether there is batch norm."""
ENCODERS = ("enc_a", "enc_b", "enc_c")
EXPERTS = ("dit_high", "dit_low")
NETS = (*ENCODERS, "dit", *EXPERTS)


class EndOfNotes(Exception):
    """The run that is replayed drew no more masks."""


class Dropout(nn.Module):
    """Dropout that notes each mask it draws, or takes it from the notes of another run."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance
        self.drawn: list[Tensor] | None = None
        self.replayed: deque[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.chance:
            return x
        if self.replayed is not None:
            if not self.replayed:
                raise EndOfNotes
            mask = self.replayed.popleft()
            assert mask.shape == x.shape, "another order of calls"
            return x * mask
        mask = (torch.rand(x.shape) >= self.chance).to(x.dtype) / (1 - self.chance)
        if self.drawn is not None:
            self.drawn.append(mask)
        return x * mask


class Network(nn.Module):
    """Two layers: (batch, WIDTH) -> (batch, WIDTH) fp32, whatever the dtype of its weights."""

    def __init__(self, flavour: str) -> None:
        super().__init__()
        chance, is_normalized = FLAVOURS[flavour]
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        # Over two groups of four, so that a batch of one has several values of each.
        self.norm = nn.BatchNorm1d(2) if is_normalized else nn.Identity()
        self.drop = Dropout(chance)
        self.last = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.dtype)).sin()
        hidden = self.norm(hidden.unflatten(1, (2, WIDTH))).flatten(1)
        return x + self.last(self.drop(hidden)).float()


def write_networks(folder: Path) -> None:
    """Write a file of each network in each flavour, buffers of batch norm filled."""
    torch.manual_seed(0)
    for name in NETS:
        for flavour in FLAVOURS:
            network = Network(flavour)
            if isinstance(network.norm, nn.BatchNorm1d):
                nn.init.normal_(network.norm.running_mean, std=0.3)
                nn.init.uniform_(network.norm.running_var, 0.5, 2)
            weights = {
                f"{name}.{key}": one for key, one in network.state_dict().items()
            }
            shift = 0.1 * (NETS.index(name) + 1)
            config = f'{{"flavour": "{flavour}", "shift": {shift}}}'
            save_file(weights, network_file(folder, name, flavour), {"config": config})


def network_file(folder: Path, name: str, flavour: str) -> Path:
    return folder / f"{name}_{flavour}.safetensors"


def read_network(path: Path, flavour: str, dtype: torch.dtype) -> Network:
    network = Network(flavour)
    weights = load_file(path)
    network.load_state_dict(
        {key.partition(".")[2]: one for key, one in weights.items()}
    )
    return network.to(dtype)


def gather(*values: Any) -> Tensor:
    """Read values in full: (batch, WIDTH) fp32 between -1 and 1."""
    total = torch.ones(1, WIDTH)
    for i, value in enumerate(values):
        total = total + (i + 1) * read(value)
    return total.sin()


def count(hidden: Tensor) -> int:
    """A small number that numbers in fp32 make, coarse enough for their rounding."""
    return int(hidden.detach().double().sum().mul(10).round()) % 1000


def read(value: Any) -> Tensor:
    """Any value -> (batch, WIDTH), or (1, WIDTH) where it is the same for a whole batch.

    Zeros at the end of an axis, as padding is, change nothing; the type counts.
    """
    if isinstance(value, Tensor):
        return _read_tensor(value)
    kind = "dict" if isinstance(value, dict) else type(value).__name__
    if isinstance(value, Image.Image):
        pixels = torch.from_numpy(np.array(value).astype(np.float32) / 255)
        return _read_tensor(pixels[None]) + _tag("image" + value.mode)
    if isinstance(value, Frames):
        pixels = value.pixels.float()[None] / 255
        return _read_tensor(pixels) + value.fps / 10
    if isinstance(value, list | tuple | dict):
        items = [*value.values()] if isinstance(value, dict) else value
        names = "".join(value) if isinstance(value, dict) else ""
        total = torch.full((1, WIDTH), _tag(kind + names))
        for i, item in enumerate(items):
            total = total + math.sin(i + 1) * read(item)
        return total
    return torch.full((1, WIDTH), _tag(f"{kind} {value!r}"))


def _read_tensor(value: Tensor) -> Tensor:
    tag = _tag(f"{value.dtype} {value.ndim} {value.layout}")
    tag += 0.5 * value.is_conj() + 0.7 * value.is_neg()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    numbers = value.to_dense().to(torch.float32)
    if not numbers.ndim:
        numbers = numbers[None]
    if not len(numbers):
        return torch.full((1, WIDTH), tag)
    # (..., WIDTH): weights that depend on the place along each axis but the first.
    places = torch.arange(WIDTH) * 1.7
    for axis in range(1, numbers.ndim):
        steps = torch.arange(numbers.shape[axis]) * (0.9 + 0.37 * axis)
        after = numbers.ndim - axis
        places = places + steps.view(-1, *[1] * after)
    weighted = numbers[..., None] * places.cos()
    while weighted.ndim > 2:
        weighted = weighted.sum(1)
    return weighted + tag


def _tag(text: str) -> float:
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % 1000 / 1000
