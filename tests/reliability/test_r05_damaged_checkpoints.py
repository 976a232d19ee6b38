"""Damaged checkpoints and weights files are named before a byte of them is used:
flipped bits, cuts, swaps.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dstrain import StateError
from dstrain.runs.checkpoints.directory import FILES
from dstrain.runs.checkpoints.saved_states import damage
from dstrain.runs.checkpoints.state import RECORD, TrainingState, load_state, save_state
from dstrain.storage import read_tensors, verify_file, write_tensors

pytestmark = pytest.mark.promise(
    "R5", "damaged checkpoints and weights are named before use"
)


def numbers(seed: int) -> dict[str, torch.Tensor]:
    """Tensors as of a LoRA, and a few of other dtypes."""
    source = torch.Generator().manual_seed(seed)
    names = ("lora_A", "lora_B", "bias")
    tensors = {
        f"blocks.{i}.{name}": torch.randn(3, 5, generator=source)
        for i in range(3)
        for name in names
    }
    return tensors | {
        "low": torch.randn(4, generator=source).bfloat16(),
        "count": torch.tensor(seed),
    }


def write_state(folder: Path, seed: int) -> None:
    tensors = numbers(seed)
    moments = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": tensors["low"]}},
        "param_groups": [{"lr": 0.1}],
    }
    save_state(
        folder,
        TrainingState(3, tensors, moments, {"last_epoch": 3}, "digest", {"torch": "2"}),
    )


def write_weights(path: Path, seed: int) -> None:
    tensors = numbers(seed)
    write_tensors(
        path,
        tensors,
        {"format": "pt", "component": "dit", "family": "tiny", "step": "3"},
        checksum=True,
    )


def flip(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """One bit is another."""
    bad = bytearray(data)
    place = chance.randrange(len(data))
    bad[place] ^= 1 << chance.randrange(8)
    return bytes(bad)


def cut(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """It ends early."""
    return data[
        : chance.randrange(len(data) - 1)
    ]  # without its last byte, a line's end, JSON is the same


def blank(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """A stretch of it is zeros, as where a disk lost a block."""
    start = chance.randrange(len(data))
    stop = start + chance.randrange(1, 64)
    changed = data[:start] + bytes(len(data[start:stop])) + data[stop:]
    return changed if changed != data else flip(data, other, chance)


def longer(data: bytes, other: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.randrange(1, 64)).replace(b" ", b"x").replace(
        b"\n", b"x"
    )


def swap(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """It is another checkpoint's, or has a part of that."""
    start = chance.randrange(len(data))
    changed = data[:start] + other[start:]
    return changed if changed != data else flip(data, other, chance)


WAYS: tuple[Callable[[bytes, bytes, random.Random], bytes], ...] = (
    flip,
    flip,
    flip,
    cut,
    blank,
    longer,
    swap,
)
"""How a file is damaged; three of seven times, one bit."""


def test_a_damaged_state_is_named_before_use(
    tmp_path: Path, trials: Callable[[int], int]
) -> None:
    for seed, name in enumerate(("good", "other")):
        write_state(tmp_path / name, seed)
    shutil.copytree(tmp_path / "good", tmp_path / "state")
    assert damage(tmp_path / "state") == ""
    for trial in range(trials(400)):
        chance = random.Random(trial)
        name = (*FILES, RECORD)[trial % 4]
        good, other = (
            (tmp_path / part / name).read_bytes() for part in ("good", "other")
        )
        (tmp_path / "state" / name).write_bytes(WAYS[trial % 7](good, other, chance))
        with pytest.raises(StateError) as caught:
            load_state(tmp_path / "state")
        assert name in str(caught.value) or name == RECORD, f"trial {trial}"
        assert str(tmp_path / "state") in caught.value.where
        (tmp_path / "state" / name).write_bytes(good)
    assert damage(tmp_path / "state") == ""


def test_a_damaged_weights_file_is_named_before_use(
    tmp_path: Path, trials: Callable[[int], int]
) -> None:
    for seed, name in enumerate(("good", "other")):
        write_weights(tmp_path / name, seed)
    good, other = ((tmp_path / part).read_bytes() for part in ("good", "other"))
    path = tmp_path / "step-3.safetensors"
    for trial in range(trials(400)):
        bad = WAYS[trial % 7](good, other, random.Random(trial))
        path.write_bytes(
            bad if bad != other else flip(good, other, random.Random(trial))
        )  # `other` is a whole file
        with pytest.raises(StateError) as caught:
            verify_file(path)
        assert caught.value.where == str(path), f"trial {trial}"
    path.write_bytes(good)
    assert verify_file(path)["component"] == "dit"
    assert read_tensors(path)[0].keys() == numbers(0).keys()
