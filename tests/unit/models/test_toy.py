"""Toy models are written as files of each component."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain import SystemFault
from dstrain.models import write_toy
from safetensors import SafetensorError


def test_a_toy_without_room_is_a_fault_of_the_system(tmp_path: Path) -> None:
    def full(folder: Path, variant: str, seed: int) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    family: Any = SimpleNamespace(load=lambda name: full)
    with pytest.raises(SystemFault, match=r"No space left(?s:.*)TMPDIR") as caught:
        write_toy(family, "base", tmp_path)
    assert caught.value.where == str(tmp_path)
