"""The kit of LoRA files covers each component and target, and damages files for good."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain.storage import with_checksum, write_tensors
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.lora_files import DAMAGES, Damage, LoraFiles, _damage
from safetensors import safe_open
from safetensors.torch import load_file


class Parametrized:
    """The part of pytest's `Metafunc` that the kit uses."""

    def __init__(self, *names: str) -> None:
        self.fixturenames = names
        self.ids: list[str] = []

    def parametrize(self, names: Any, values: Any, ids: list[str]) -> None:
        self.ids = ids
        assert len(values) == len(ids)


def test_cases_are_the_default_targets_of_each_component_and_the_familys_own(
    fine: FamilyUnderTest,
) -> None:
    class OfFine(LoraFiles):
        family = fine.family.name
        targets = MappingProxyType({"one": ("to_q",)})
        readers = MappingProxyType({"dit": {}})

    found = Parametrized("case")
    OfFine().pytest_generate_tests(found)  # type: ignore[arg-type]  # a stand-in
    assert found.ids == [
        "base-dit-default",
        "base-dit-one",
        "base-text_encoder-default",
    ]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_each_damage_changes_keys_header_or_shapes(
    damage: Damage, tmp_path: Path
) -> None:
    path = tmp_path / "lora.safetensors"
    tensors = {
        f"transformer.blocks.{block}.to_q.lora_{part}.weight": torch.ones(2, 2)
        for block in (0, 1)
        for part in "AB"
    }
    header = {"family": "fine", "rank": "2"}
    write_tensors(path, tensors, with_checksum(tensors, header))
    _damage(path, damage)
    with safe_open(path, framework="pt") as file:
        left = file.metadata() == {"family": "fine", "rank": "2"}
    shapes = {key: tensor.shape for key, tensor in load_file(path).items()}
    whole = {key: tensor.shape for key, tensor in tensors.items()}
    assert not (left and shapes == whole)
