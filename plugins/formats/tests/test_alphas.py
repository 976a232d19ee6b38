"""Alpha is what a file, its header or the command says; what nobody says is not guessed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, StateError, UsageError
from dstrain.config import LoraFile
from dstrain.lora import read_lora
from safetensors.torch import load_file
from torch import Tensor

from tests.support.lora_family import (
    MODEL,
    SHAPES,
    adapter,
    as_trained,
    default_names,
    ours,
    prefixed,
    read,
    same,
    with_alpha,
    written,
)

PATH = Path("x.safetensors")
TO_Q = LoraConfig("dit", ("to_q",), 4, 6.0)
FOLDED = {"scale": "in lora_B"}


def test_ai_toolkit_leaves_alpha_out_and_says_who_wrote_the_file(
    tmp_path: Path,
) -> None:
    """toolkit/lora_special.py: with names of diffusers, alpha is the rank."""
    tensors = as_trained(TO_Q)
    software = {"software": json.dumps({"name": "ai-toolkit", "version": "0.5"})}
    layers = read(written(tmp_path / PATH, tensors, software)).layers
    assert {layer.alpha for layer in layers.values()} == {4.0}
    for other in ('{"name": "another"}', "[]", "no", "{}", "[" * 100_000):
        path = written(tmp_path / PATH, tensors, {"software": other})
        with pytest.raises(StateError, match="@alpha=rank"):
            read(path)


@pytest.mark.parametrize(("alpha", "wanted"), [("rank", 4.0), (6.0, 6.0)])
def test_an_alpha_can_be_given_where_a_file_has_none(
    alpha: Any, wanted: float, tmp_path: Path
) -> None:
    path = written(tmp_path / PATH, as_trained(TO_Q))
    with pytest.raises(StateError) as caught:
        read(path)
    assert caught.value.help_lines[0].endswith(f" {path}@alpha=rank")
    (lora,) = read_lora(LoraFile(path, alpha=alpha), MODEL, {"dit": SHAPES})
    assert {layer.alpha for layer in lora.layers.values()} == {wanted}


@pytest.mark.parametrize("peft", [False, True])
def test_patterns_of_rank_and_alpha_are_followed(peft: bool, tmp_path: Path) -> None:
    """By the end of a name, or by the whole of it."""
    tensors = as_trained(TO_Q)
    first = "transformer.blocks.0.attn.to_q.lora_{}.weight"
    tensors[first.format("A")] = tensors[first.format("A")][:2]
    tensors[first.format("B")] = tensors[first.format("B")][:, :2]
    header = adapter(
        rank_pattern={"^attn.to_q": 3, r"^blocks\.0\.attn\.to_q": 2},
        alpha_pattern={"o_q": 7, "1.attn.to_q": 5},
    )
    if peft:
        (tmp_path / "adapter_config.json").write_text(
            header.pop("lora_adapter_metadata").replace("transformer.", "")
        )
        tensors = prefixed(tensors, "base_model.model.")
    layers = read(written(tmp_path / PATH, tensors, header)).layers
    found = [(layer.rank, layer.alpha) for layer in layers.values()]
    assert found == [(2, 6.0), (4, 5.0)]


def test_diffsynth_has_no_alpha_and_that_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = default_names(prefixed(load_file(ours(tmp_path)[0]), "pipe.dit."))
    path = written(tmp_path / PATH, tensors)
    assert {layer.alpha for layer in read(path).layers.values()} == {4.0}
    assert str(path) in capsys.readouterr().err
    read(ours(tmp_path)[0])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("alpha", ["", "nan", "inf", "0", "-6.0", "six"])
def test_an_alpha_in_the_header_that_is_none_is_refused_where_it_is_needed(
    alpha: str, tmp_path: Path
) -> None:
    header = {**FOLDED, "alpha": alpha}
    path = written(tmp_path / PATH, load_file(ours(tmp_path)[0]), header)
    lora = read(path)
    assert {layer.scale for layer in lora.layers.values()} == {1.0}
    with pytest.raises(StateError, match=f"'{alpha}'"):
        lora.trained_layers(path)


def test_an_alpha_in_the_header_of_another_program_says_nothing_about_b(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path / PATH, with_alpha(as_trained()), {"alpha": "32", "scale": "1"}
    )
    lora = read(path)
    assert same(lora.trained_layers(path), lora.layers)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_comfyui(tensors: dict[str, Tensor]) -> Tensor:
    """From comfy/weight_adapter/lokr.py: alpha counts only where there is a product."""
    dim = None
    matrices = []
    for name in ("lokr_w1", "lokr_w2"):
        if name in tensors:
            matrices.append(tensors[name])
            continue
        dim = len(tensors[f"{name}_b"])
        matrices.append(tensors[f"{name}_a"] @ tensors[f"{name}_b"])
    alpha = tensors.get("alpha")
    scale = 1.0 if alpha is None or dim is None else alpha.item() / dim
    return scale * torch.kron(*matrices)


def of_every_form() -> dict[str, dict[str, Tensor]]:
    """The matrices of four layers of 6 rows and columns: those that are whole, the second
    a product, the first one, and both.
    """
    halves = {"lokr_w1_a": numbers(2, 3), "lokr_w1_b": numbers(3, 3)}
    products = {"lokr_w2_a": numbers(3, 1), "lokr_w2_b": numbers(1, 2)}
    whole_1, whole_2 = {"lokr_w1": numbers(2, 3)}, {"lokr_w2": numbers(3, 2)}
    return {
        "attn.to_q": whole_1 | whole_2,
        "attn.to_k": whole_1 | products,
        "text": halves | whole_2,
        "attn.to_out.0": halves | products,
    }


def in_file(path: Path, layers: dict[str, dict[str, Tensor]], **header: str) -> Path:
    tensors = {
        f"transformer.blocks.0.{layer}.{part}": one
        for layer, parts in layers.items()
        for part, one in parts.items()
    }
    return written(path / PATH, tensors, header)


@pytest.mark.parametrize("alpha", [5.0, None])
def test_a_file_may_have_lokr_of_every_form(
    alpha: float | None, tmp_path: Path
) -> None:
    """It acts as in ComfyUI, and so does what becomes of it with alpha folded in."""
    layers = of_every_form()
    if alpha is not None:
        for parts in layers.values():
            parts["alpha"] = torch.tensor(alpha)
    found = read(in_file(tmp_path, layers, **({} if alpha else FOLDED))).layers
    assert len(found) == len(layers)
    for name, parts in layers.items():
        layer = found[f"blocks.0.{name}"]
        there = by_comfyui(parts)
        assert torch.allclose(layer.changed(torch.zeros(6, 6)), there, atol=1e-6)
        folded = layer.folded()
        for more in ({}, {"alpha": torch.tensor(folded.alpha)}):
            assert torch.allclose(by_comfyui(folded.parts() | more), there, atol=1e-6)


def test_alpha_of_some_products_alone_is_refused(tmp_path: Path) -> None:
    """Nothing says what the others' alpha was; one of whole matrices has no effect."""
    layers = of_every_form()
    for name in ("attn.to_q", "attn.to_k"):
        layers[name]["alpha"] = torch.tensor(5.0)
    with pytest.raises(StateError, match=r"2 of 3 .*\n.*: .*blocks\.0\.text"):
        read(in_file(tmp_path, layers))


def test_without_any_alpha_of_a_lokr_it_is_asked_for(tmp_path: Path) -> None:
    path = in_file(tmp_path, of_every_form())
    with pytest.raises(StateError, match="@alpha=rank"):
        read(path)
    file = LoraFile(path, component="dit", alpha=2.0)
    (lora,) = read_lora(file, MODEL, {"dit": SHAPES})
    assert [layer.scale for layer in lora.layers.values()] == [2.0, 2.0, 1.0, 2 / 3]
    whole = in_file(tmp_path, {"attn.to_q": of_every_form()["attn.to_q"]})
    assert read(whole).layers
    with pytest.raises(UsageError, match="--alpha"):
        read_lora(replace(file, path=whole), MODEL, {"dit": SHAPES})
