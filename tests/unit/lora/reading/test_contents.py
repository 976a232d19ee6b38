"""What a file holds for a component: the alpha that its layers were trained with."""

from pathlib import Path

import pytest
from dstrain import StateError
from safetensors.torch import load_file

from tests.support.lora_family import (
    as_trained,
    ours,
    read,
    same,
    with_alpha,
    written,
)  # fmt: skip


@pytest.mark.parametrize("alpha", ["", "nan", "inf", "0", "-6.0", "six"])
def test_an_alpha_in_the_header_that_is_none_is_refused_where_it_is_needed(
    alpha: str, tmp_path: Path
) -> None:
    tensors = load_file(ours(tmp_path)[0])
    path = written(
        tmp_path / "x.safetensors", tensors, {"scale": "in lora_B", "alpha": alpha}
    )
    lora = read(path)
    assert {layer.scale for layer in lora.layers.values()} == {1.0}
    with pytest.raises(
        StateError, match=r"x\.safetensors: its header has no valid alpha"
    ):
        lora.trained_layers(path)


def test_an_alpha_in_the_header_of_another_program_says_nothing_about_b(
    tmp_path: Path,
) -> None:
    tensors = with_alpha(as_trained())
    path = written(tmp_path / "x.safetensors", tensors, {"alpha": "32"})
    lora = read(path)
    assert same(lora.trained_layers(path), lora.layers)
