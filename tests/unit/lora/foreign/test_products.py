"""LoHa is computed as LyCORIS has it, whole and in parts, and read only if it is whole."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from dstrain import Pipeline, StateError
from dstrain.lora import merge_layers
from dstrain.lora.export import export
from dstrain.lora.foreign.products import parse_loha
from torch import Tensor, nn

from tests.support.lora_family import MODEL, SHAPES, network, output, read, written

PATH = Path("x.safetensors")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loha(rows: int, columns: int, rank: int = 2) -> dict[str, Tensor]:
    return {
        "hada_w1_a": numbers(rows, rank, seed=1),
        "hada_w1_b": numbers(rank, columns, seed=2),
        "hada_w2_a": numbers(rows, rank, seed=3),
        "hada_w2_b": numbers(rank, columns, seed=4),
        "alpha": torch.tensor(3.0),
    }


def test_a_layer_acts_as_that_of_peft() -> None:
    """It trains LyCORIS' formula; its names are those of LyCORIS but for the adapter."""
    module: Any = nn.Sequential(nn.Linear(5, 6))
    config = peft.LoHaConfig(r=2, alpha=3, target_modules=["0"], init_weights=False)
    wanted: Any = peft.inject_adapter_in_model(config, module)
    state = {
        f"0.{name}": getattr(wanted[0], name)["default"].detach()
        for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    }
    weights = parse_loha(PATH, {**state, "0.alpha": torch.tensor(3.0)})["0"]
    assert weights.alpha is not None
    found = weights.layer(weights.alpha).change()
    assert torch.allclose(found, wanted[0].get_delta_weight("default"), atol=1e-6)


def test_a_loha_of_several_layers_at_once_is_merged_into_each(tmp_path: Path) -> None:
    own = loha(18, 6)
    tensors = {f"lora_unet_double_0_qkv.{part}": one for part, one in own.items()}
    lora = read(written(tmp_path / "x.safetensors", tensors))
    assert not lora.layers
    product = (own["hada_w1_a"] @ own["hada_w1_b"]) * (
        own["hada_w2_a"] @ own["hada_w2_b"]
    )
    module, plain = network(), network()
    merge_layers(module, lora.merged, 0.5)
    for i, part in enumerate("qkv"):
        name = f"blocks.0.attn.to_{part}.weight"
        change = module.get_parameter(name) - plain.get_parameter(name)
        wanted = 0.5 * 1.5 * product[6 * i :][:6]
        assert torch.allclose(change, wanted, atol=1e-5)
    with pytest.raises(
        StateError, match="contains LoHa, which training cannot start from"
    ):
        lora.refuse_merged(PATH, "training cannot start from")


def test_alpha_of_some_layers_alone_is_refused(tmp_path: Path) -> None:
    """Of one type or of several: nothing says what the others' alpha was."""
    stated = {
        f"lycoris_blocks_0_attn_to_q.{part}": one for part, one in loha(6, 6).items()
    }
    silent = {
        f"lycoris_blocks_0_attn_to_k.{part}": one
        for part, one in loha(6, 6).items()
        if part != "alpha"
    }
    plain = {
        "lycoris_blocks_0_attn_to_v.lora_down.weight": torch.ones(2, 6),
        "lycoris_blocks_0_attn_to_v.lora_up.weight": torch.ones(6, 2),
    }
    assert "lycoris_blocks_0_attn_to_q.alpha" in stated
    for others in (silent, plain):
        path = written(tmp_path / "x.safetensors", {**stated, **others})
        with pytest.raises(StateError, match="1 of 2 layers lack an alpha"):
            read(path)


def test_layers_of_several_types_in_one_file_are_each_read(tmp_path: Path) -> None:
    tensors = {
        f"lycoris_blocks_0_attn_to_q.{part}": one for part, one in loha(6, 6).items()
    }
    tensors |= {
        "lycoris_blocks_0_attn_to_k.lokr_w1": numbers(2, 3),
        "lycoris_blocks_0_attn_to_k.lokr_w2": numbers(3, 2),
        "lycoris_blocks_0_attn_to_v.diff_b": numbers(6),
    }
    lora = read(written(tmp_path / "x.safetensors", tensors))
    assert list(lora.merged) == ["blocks.0.attn.to_q"]
    assert list(lora.layers) == ["blocks.0.attn.to_k"]
    assert list(lora.differences) == ["blocks.0.attn.to_v.bias"]
    assert "blocks.0.attn.to_v.bias" in SHAPES


def test_lora_and_lokr_in_one_file_are_both_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "lycoris_blocks_0_attn_to_k.lokr_w1": numbers(2, 3),
        "lycoris_blocks_0_attn_to_k.lokr_w2": numbers(3, 2),
        "lycoris_blocks_0_attn_to_q.lora_down.weight": numbers(2, 6),
        "lycoris_blocks_0_attn_to_q.lora_up.weight": numbers(6, 2),
        "lycoris_blocks_0_attn_to_q.alpha": torch.tensor(3.0),
    }
    file = written(tmp_path / "x.safetensors", tensors, {"family": "fused"})
    spec: Any = SimpleNamespace(unused_parameters={}, variant="base")
    pipeline = Pipeline(spec, MODEL, {"dit": network()})
    pipeline.load_lora(file, 0.5)
    merged = network()
    merge_layers(merged, read(file).layers, 0.5)
    found = output(pipeline.components["dit"])
    assert torch.allclose(found, output(merged), atol=1e-5)
    assert not torch.allclose(found, output(network()), atol=1e-3)
    monkeypatch.setattr("dstrain.lora.export.load_family", lambda *_: MODEL)
    with pytest.raises(StateError, match="layers of lokr and lora; export writes one"):
        export(file, tmp_path / "y.safetensors", "diffusers")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hada_w2_b": None}, "a has only hada_w1_a, hada_w1_b, hada_w2_a"),
        ({"hada_w1_b": numbers(3, 5)}, "a has matrices of different ranks"),
        ({"hada_w2_a": numbers(7, 2)}, "a has two products of different shapes"),
        ({"hada_w1_a": numbers(6, 2) / 0}, "hada_w1_a is not a finite matrix"),
        ({"alpha": torch.ones(2)}, "alpha is not a finite number"),
        ({"hada_t1": numbers(6, 2)}, "1 of its . keys are of no LoHa layer"),
        ({"dora_scale": numbers(6, 1)}, "1 of its . keys are of no LoHa layer"),
    ],
)
def test_what_is_no_whole_loha_is_refused(change: Any, match: str) -> None:
    parts = {**loha(6, 5), **change}
    tensors = {f"a.{name}": one for name, one in parts.items() if one is not None}
    with pytest.raises(StateError, match=match):
        parse_loha(PATH, tensors)
