"""Draw random numbers by counter: each draw has a key, so it depends neither on the
number of processes nor on where a run resumed.

A key is (seed, epoch, repeat, row, chunk); each stream of a sample counts its own
draws. Numbers come from Philox 4x64 (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3") on the CPU, in fp32.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor


class SampleKey(NamedTuple):
    """The key of a sample: all that its random numbers depend on."""

    seed: int
    epoch: int
    repeat: int
    row: int
    chunk: int = 0


def digest(key: Sequence[int], stream: str, draw: int = 0) -> bytes:
    """Return 16 bytes that identify one draw of one stream under a key."""
    numbers = [*key, draw]
    # Little-endian on every machine, each number in 8 bytes.
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return hashlib.blake2b(packed + stream.encode(), digest_size=16).digest()


def choose(key: Sequence[int], stream: str, weights: Sequence[int]) -> int:
    """Return a number below that of the weights, drawn under a key, each as probable as
    its weight, which is a whole number of at least 0, is of the sum of all.
    """
    drawn = int.from_bytes(digest(key, stream)[:8], "little")
    # Of 2**64 equally probable numbers, each weight has its share.
    rest = drawn * sum(weights) >> 64
    for number, weight in enumerate(weights):
        rest -= weight
        if rest < 0:
            return number
    raise ValueError("all weights are 0")


def seed_global(key: Sequence[int], stream: str) -> None:
    """Seed torch's global generators, which dropout and LoRA initialization use."""
    seed = int.from_bytes(digest(key, stream)[:8], "little") >> 1
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # manual_seed would also queue a seed, with a stack trace, for each absent device.
        torch.default_generator.manual_seed(seed)


class _Philox(ISeedSequence):
    """A seed sequence that makes the digest itself the generator's key; a number as a
    key would cost a draw of the system's entropy.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the key as `n_words` words of its own."""
        return np.frombuffer(self.key, np.dtype(dtype).newbyteorder("<"), n_words)


class Rng:
    """The random numbers of one batch: sample i draws under keys[i], so a batch equals
    its samples one by one.
    """

    def __init__(self, keys: Sequence[SampleKey], scope: str = "") -> None:
        self.keys = keys
        self.scope = scope
        self._drawn: dict[str, int] = {}

    def scoped(self, name: str) -> "Rng":
        """Return the random numbers of one unit, with streams of its own."""
        return Rng(self.keys, f"{name}/")

    def normal(self, stream: str, shape: Sequence[int] = ()) -> Tensor:
        """Return (batch, *shape) fp32 standard normal numbers."""
        return self._draw(np.random.Generator.standard_normal, stream, shape)

    def uniform(self, stream: str, shape: Sequence[int] = ()) -> Tensor:
        """Return (batch, *shape) fp32 numbers, uniform in [0, 1)."""
        return self._draw(np.random.Generator.random, stream, shape)

    def _draw(
        self, distribution: Callable[..., Any], stream: str, shape: Sequence[int]
    ) -> Tensor:
        draw = self._drawn.get(stream, 0)
        self._drawn[stream] = draw + 1
        numbers = np.empty((len(self.keys), *shape), np.float32)
        for i, key in enumerate(self.keys):
            # numpy takes any ISeedSequence; its annotation names SeedSequence alone.
            seeds: Any = _Philox(digest(key, self.scope + stream, draw))
            generator = np.random.Generator(np.random.Philox(seeds))
            # A slice is written into even where one number is drawn per sample;
            # numbers[i] would then be a copy.
            own = numbers[i : i + 1]
            distribution(generator, dtype=np.float32, out=own)
        return torch.from_numpy(numbers)
