"""Layers are of the component whose names they have; what may be of two is refused."""

from pathlib import Path

import pytest
import torch
from dstrain import StateError
from dstrain.config import LoraFile
from dstrain.lora import read_lora
from safetensors.torch import load_file

from tests.support.lora_family import (
    MODEL,
    SHAPES,
    default_names,
    ours,
    prefixed,
    read,
    with_alpha,
    written,
)  # fmt: skip


def test_experts_are_distinguished_by_the_header_or_by_what_is_asked(
    tmp_path: Path,
) -> None:
    two = {"dit": SHAPES, "dit2": SHAPES}
    tensors = load_file(ours(tmp_path)[0])
    bare = written(tmp_path / "x.safetensors", with_alpha(tensors))
    with pytest.raises(
        StateError,
        match="is ambiguous: it fits 2 namings of dit and dit2",
    ) as caught:
        read(bare, **two)
    assert caught.value.help_lines[0] == (
        f"say which component it is for: --lora dit={bare} or --lora dit2={bare}"
    )
    assert "--component dit2" in caught.value.help_lines[1]
    with pytest.raises(StateError, match="is ambiguous") as caught:
        read_lora(LoraFile(bare, 0.5, skip_missing=True), MODEL, two)
    # As it was typed.
    assert f"--lora dit={bare}:0.5@skip_missing or" in caught.value.help_lines[0]
    assert (
        read_lora(LoraFile(bare, component="dit2"), MODEL, two)[0].component == "dit2"
    )
    named = written(
        tmp_path / "y.safetensors", with_alpha(tensors), {"component": "dit2"}
    )
    assert read(named, **two).component == "dit2"
    with pytest.raises(StateError, match="is a LoRA for dit2, not for dit"):
        read_lora(LoraFile(named, component="dit"), MODEL, two)
    with pytest.raises(StateError, match="has 12 layers for dit2, which is not loaded"):
        read(named)
    pipe = default_names(prefixed(tensors, "pipe.dit2."))
    assert read(written(tmp_path / "z.safetensors", pipe), **two).component == "dit2"


def test_names_that_fit_in_two_ways_are_refused(tmp_path: Path) -> None:
    own = {"proj_in.weight": (6, 6), "img_in.weight": (6, 6)}
    tensors = {
        "transformer.img_in.lora_A.weight": torch.ones(1, 6),
        "transformer.img_in.lora_B.weight": torch.ones(6, 1),
    }
    path = written(tmp_path / "x.safetensors", with_alpha(tensors))
    with pytest.raises(StateError, match="is ambiguous: it fits 2 namings of dit"):
        read(path, dit=own)
