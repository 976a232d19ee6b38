"""Toy models are written as files of each component."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import SystemFault
from dstrain.models import write_toy
from dstrain.plugin import toy_writer
from safetensors import SafetensorError

from tests.support.family import COMPONENTS


def test_a_toy_for_which_the_disk_has_no_room_is_a_fault_of_the_system(
    tmp_path: Path,
) -> None:
    def full(folder: Path, variant: str, seed: int) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    family: Any = SimpleNamespace(load=lambda name: full)
    with pytest.raises(SystemFault, match=r"No space left(?s:.*)TMPDIR") as caught:
        write_toy(family, "base", tmp_path)
    assert caught.value.where == str(tmp_path)


SIZES: dict[str, dict[str, int]] = {
    "dit": {"width": 8, "depth": 2},
    "vae": {"branch": 8},
}


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_equal_arguments_write_equal_models_and_leave_the_generator_alone(
    tmp_path: Path,
) -> None:
    before = torch.random.get_rng_state()
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        toy_writer(COMPONENTS, SIZES)(tmp_path / name, seed=seed)
    assert torch.equal(before, torch.random.get_rng_state())
    one, same, other = (contents(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same
    assert set(one) == {
        "transformer/config.json",
        "transformer/model.safetensors",
        "vae/config.json",
        "vae/model.safetensors",
    }
    assert {name for name in one if one[name] != other[name]} == {
        "transformer/model.safetensors",
        "vae/model.safetensors",
    }


TOY: dict[str, Any] = {
    "files": {"model_index.json": {"kind": "Tiny", "parts": 1}},
    "networks": {"dit": {"width": 8, "depth": 2}},
    "sharded": ["dit"],
    "variants": {
        "wide": {
            "files": {"model_index.json": {"parts": 2}, "more/one.json": {"a": 1}},
            "networks": {"dit": {"width": 16}, "vae": {"branch": 8}},
        },
        "deep": {"like": "wide", "networks": {"dit": {"depth": 3}}},
    },
}


def test_a_variants_toy_has_files_and_sizes_of_its_own(tmp_path: Path) -> None:
    def read(place: str) -> Any:
        return json.loads((tmp_path / place).read_text())

    write = toy_writer(COMPONENTS, **TOY)
    write(tmp_path / "base", "base")
    assert read("base/model_index.json") == {"kind": "Tiny", "parts": 1}
    assert read("base/transformer/config.json") == {"width": 8, "depth": 2}
    assert not (tmp_path / "base/vae").exists()
    own = {"text_encoder": {"width": 4}, "vae": {"branch": 4}}
    write(tmp_path / "deep", "deep", 1, own)
    assert read("deep/model_index.json") == {"kind": "Tiny", "parts": 2}
    assert read("deep/more/one.json") == {"a": 1}
    assert read("deep/transformer/config.json") == {"width": 16, "depth": 3}
    assert read("deep/vae/config.json") == {"branch": 4}
    assert read("deep/text_encoder/config.json")["width"] == 4
    index = read("deep/transformer/model.safetensors.index.json")
    assert len(set(index["weight_map"].values())) == 2
