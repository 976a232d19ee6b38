"""The family of files without an id is told by their keys."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dstrain import StateError
from dstrain.models.naming.content import families_of
from dstrain.plugin import ModelFamily
from dstrain.registry import load_family
from safetensors.torch import save_file

from tests.support.family import MODEL, write

REAL = ("flux", "qwen_image", "wan")


@pytest.fixture(scope="module")
def known() -> list[ModelFamily]:
    return [MODEL, *map(load_family, REAL)]


@pytest.mark.parametrize("name", REAL)
def test_a_toy_of_each_family_is_told_whole_and_by_its_denoiser_alone(
    name: str, known: list[ModelFamily], tmp_path: Path
) -> None:
    family = load_family(name)
    family.load("toy")(tmp_path, family.variants[0], 0)
    (tmp_path / "model_index.json").unlink()
    assert families_of(tmp_path, known) == [family]
    assert families_of(tmp_path / "transformer", known) == [family]


def test_a_part_without_the_denoiser_may_be_of_one_family_only(
    known: list[ModelFamily], tmp_path: Path
) -> None:
    write(tmp_path / "model")
    file = tmp_path / "model/text_encoder/model-1-of-1.safetensors"
    assert families_of(file, known) == [MODEL]
    twin = replace(MODEL, name="twin")
    assert families_of(file, [MODEL, twin]) == [MODEL, twin]
    assert families_of(file, known[1:]) == []


def test_a_family_that_is_broken_is_passed_over_and_a_damaged_file_is_not(
    tmp_path: Path,
) -> None:
    write(tmp_path / "model")
    broken = replace(MODEL, components="nowhere.at_all:COMPONENTS")
    assert families_of(tmp_path / "model", [broken, MODEL]) == [MODEL]
    file = tmp_path / "damaged.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(StateError, match=r"damaged\.safetensors"):
        families_of(file, [MODEL])
