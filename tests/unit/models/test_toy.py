"""Toy models are written as files of each component."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain.errors import SystemFault
from dstrain.models.toy import write_toy
from dstrain.registry.family import ModelFamily
from safetensors import SafetensorError

from tests.support.family import MODEL, weights_of


def test_a_toy_for_which_the_disk_has_no_room_is_a_fault_of_the_system(
    tmp_path: Path,
) -> None:
    def full(folder: Path, variant: str, seed: int) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    family: Any = SimpleNamespace(load=lambda name: full)
    with pytest.raises(
        SystemFault, match=r"a toy model cannot be written: .*No space left"
    ) as caught:
        write_toy(family, "base", tmp_path)
    assert (
        caught.value.where == str(tmp_path) and "TMPDIR" in caught.value.help_lines[0]
    )


def test_toy_files_are_one_entry_per_component(tmp_path: Path) -> None:
    family: ModelFamily = MODEL
    made = write_toy(family, "base", tmp_path)
    assert {tuple(model.path or ()) for model in made} == {
        tuple(paths) for paths in weights_of(tmp_path).values()
    }
