"""Alpha is what a file, its header or the command says; what nobody says is not guessed."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import LoraConfig, StateError
from dstrain.config import LoraFile
from dstrain.lora import read_lora
from safetensors.torch import load_file

from tests.support.lora_family import (
    MODEL,
    SHAPES,
    adapter,
    as_trained,
    default_names,
    ours,
    prefixed,
    read,
    written,
)  # fmt: skip


def test_ai_toolkit_leaves_alpha_out_and_says_who_wrote_the_file(
    tmp_path: Path,
) -> None:
    """toolkit/lora_special.py: with names of diffusers, alpha is the rank."""
    tensors = as_trained(LoraConfig("dit", ("to_q",), 4, 6.0))
    software = {"software": json.dumps({"name": "ai-toolkit", "version": "0.5"})}
    layers = read(written(tmp_path / "x.safetensors", tensors, software)).layers
    assert {layer.alpha for layer in layers.values()} == {4.0}
    for other in ('{"name": "another"}', "[]", "no", "{}", "[" * 100_000):
        path = written(tmp_path / "y.safetensors", tensors, {"software": other})
        with pytest.raises(StateError, match="rank and alpha are unknown"):
            read(path)


@pytest.mark.parametrize(("alpha", "wanted"), [("rank", 4.0), (6.0, 6.0)])
def test_an_alpha_can_be_given_where_a_file_has_none(
    alpha: Any, wanted: float, tmp_path: Path
) -> None:
    tensors = as_trained(LoraConfig("dit", ("to_q",), 4, 6.0))
    path = written(tmp_path / "x.safetensors", tensors)
    with pytest.raises(StateError, match="rank and alpha are unknown") as caught:
        read(path)
    assert f"({path}@alpha=rank)" in caught.value.help_lines[1]
    (lora,) = read_lora(LoraFile(path, alpha=alpha), MODEL, {"dit": SHAPES})
    assert {layer.alpha for layer in lora.layers.values()} == {wanted}


def test_patterns_of_rank_and_alpha_are_followed(tmp_path: Path) -> None:
    path, _ = ours(tmp_path, LoraConfig("dit", ("to_q",), 4, 6.0))
    tensors = load_file(path)
    key = "transformer.blocks.0.attn.to_q.lora_A.weight"
    tensors[key] = tensors[key][:2]
    key = "transformer.blocks.0.attn.to_q.lora_B.weight"
    tensors[key] = tensors[key][:, :2]
    header = adapter(
        rank_pattern={"blocks.0.attn.to_q": 2}, alpha_pattern={"1.attn.to_q": 5}
    )
    layers = read(written(tmp_path / "x.safetensors", tensors, header)).layers
    assert [(layer.rank, layer.alpha) for layer in layers.values()] == [
        (2, 6.0),
        (4, 5.0),
    ]


def test_diffsynth_has_no_alpha_and_that_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = default_names(prefixed(load_file(ours(tmp_path)[0]), "pipe.dit."))
    lora = read(written(tmp_path / "x.safetensors", tensors))
    assert {layer.alpha for layer in lora.layers.values()} == {4.0}
    assert "x.safetensors: has no alpha; using the rank" in capsys.readouterr().err
    read(ours(tmp_path)[0])
    assert capsys.readouterr().err == ""
