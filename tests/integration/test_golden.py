"""Golden runs name what differs between two trees, and nothing else."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tools.golden import cases
from tools.golden.compare import ROW, differences

COMMANDS = (("--model", "m"), ("train", "--help"), ("graph",))
KEY = b"the key of one value"
Change = Callable[[Path], object]


def write_weights(path: Path, value: float, rank: int = 4) -> None:
    header = {"rank": str(rank), "version.of": str(path)}
    save_file({"w": torch.tensor([1.0, value])}, path, header)


def write_shard(path: Path, value: float) -> None:
    layout = json.dumps({"tensors": [["", "float32", [1]]]})
    table = base64.b64encode(ROW.pack(KEY, 0, 4, 0, b"")).decode()
    header = {"dstrain": json.dumps({"layouts": [layout]}), "dstrain.values": table}
    save_file({"0": torch.tensor([value])}, path, header)


def write_image(path: Path, value: int) -> None:
    Image.fromarray(np.full((2, 2), value, np.uint8)).save(path)


@pytest.fixture
def left(tmp_path: Path) -> Callable[[str], Path]:
    """Return left(side): a folder as a case leaves it, with its own path and times in it."""

    def write(side: str) -> Path:
        folder = tmp_path / side
        files = folder / "files"
        for place in (files / "cache/shards", folder / "printed"):
            place.mkdir(parents=True)
        write_weights(files / "a.safetensors", 1)
        write_shard(files / f"cache/shards/{side}.safetensors", 1)
        write_image(files / "a.png", 0)
        texts = {
            "files/cache/store.json": "{}",
            "files/loss.csv": f"loss,memory_gib\n0.5,{len(side)}\n0.25,1\n",
            "files/run.json": json.dumps({"at": str(files), "seed": 0}),
            "printed/0.out": side,
            "printed/1.out": "Options:\n  --seed INT  One.\n     [default: 0]\n",
            "printed/2.out": f"plan\nin {files}\n",
            "codes.json": "[0, 0, 0]",
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
        return folder

    return write


def rewrite(name: str, old: str, new: str) -> Change:
    """Return what replaces a text in a file."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


CHANGES: dict[str, Change] = {
    "a.safetensors: w: differ by up to 0.5": lambda folder: write_weights(
        folder / "files/a.safetensors", 1.5
    ),
    "a.safetensors: rank: differ by up to 4": lambda folder: write_weights(
        folder / "files/a.safetensors", 1, rank=8
    ),
    f"cache by key: {KEY.hex()}: differ by up to 2": lambda folder: write_shard(
        folder / "files/cache/shards/own.safetensors", 3
    ),
    "a.png: L: differ by up to 9": lambda folder: write_image(
        folder / "files/a.png", 9
    ),
    "files: loss.csv: missing": lambda folder: (folder / "files/loss.csv").unlink(),
    "loss.csv: loss: differ by up to 0.25": rewrite("files/loss.csv", "0.5", "0.75"),
    "run.json: seed: differ by up to 1": rewrite("files/run.json", ": 0", ": 1"),
    "command 1: --model m: exit code 3, was 0": rewrite("codes.json", "[0", "[3"),
    "command 2: train --help: --seed INT: differ by up to 1": rewrite(
        "printed/1.out", ": 0", ": 1"
    ),
    "command 3: graph: plan: missing": rewrite("printed/2.out", "plan\n", ""),
}


def test_equal_trees_do_not_differ(left: Callable[[str], Path]) -> None:
    assert list(differences(left("base"), left("own"), COMMANDS)) == []


@pytest.mark.parametrize("line", CHANGES)
def test_a_change_is_named(line: str, left: Callable[[str], Path]) -> None:
    base, own = left("base"), left("own")
    CHANGES[line](own)
    assert line in list(differences(base, own, COMMANDS))


def test_a_command_that_fails_in_both_is_named_where_all_should_work(
    left: Callable[[str], Path],
) -> None:
    sides = left("base"), left("own")
    for side in sides:
        (side / "codes.json").write_text("[0, 0, 3]")
    assert list(differences(*sides, COMMANDS)) == []
    named = list(differences(*sides, COMMANDS, shows_errors=False))
    assert named == ["command 3: graph: exit code 3, was 3"]


def test_the_small_set_is_a_part_of_everything_and_names_are_unique() -> None:
    names = [case.name for case in cases.everything()]
    assert len(names) == len(set(names))
    assert {case.name for case in cases.small_set()} < set(names)
