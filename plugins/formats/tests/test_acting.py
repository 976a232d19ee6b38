"""Layers of every type act as those of peft, added to a network or merged into it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, UsageError, save_lora
from dstrain.config import LoraFile
from dstrain.lora import (
    add_layers,
    base_shapes,
    inject,
    lora_layers,
    lora_state,
    read_lora,
)
from dstrain.lora.merging import merged
from torch import nn

from tests.support.lora_family import MODEL, merge_layers, network, output, trained
from tests.support.stored_weights import halved

SPEC = LoraConfig("dit", ("to_q", "to_out.0"), 2, 3.0)
DORA = replace(SPEC, type="dora")
LOKR = replace(SPEC, type="lokr", rank=1)
TYPES = pytest.mark.parametrize(
    "config",
    [
        SPEC,
        replace(SPEC, ranks=(("to_q", 4), ("0.attn.to_q", 3)), alphas=(("to_out", 1),)),
        DORA,
        LOKR,
        replace(LOKR, rank=6, settings=(("factor", 3),)),
    ],
    ids=["lora", "lora of several ranks", "dora", "lokr", "lokr of whole matrices"],
)
Q = "blocks.0.attn.to_q"


@TYPES
def test_merging_is_computed_in_fp32_and_keeps_the_dtype(config: LoraConfig) -> None:
    module = network().bfloat16()
    layers = lora_layers(trained(config))
    wanted = {name: weight.clone() for name, weight in module.state_dict().items()}
    for name, layer in layers.items():
        weight = wanted[f"{name}.weight"]
        wanted[f"{name}.weight"] = layer.changed(weight.float()).bfloat16()
    merge_layers(module, layers)
    after = module.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in wanted.items())
    # Below layers that peft added, too.
    module = network().bfloat16()
    add_layers(module, lora_layers(trained(SPEC)))
    merge_layers(module, layers)
    own = module.get_submodule(Q).base_layer.weight
    assert torch.equal(own, wanted[f"{Q}.weight"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SPEC, replace(SPEC, rank=4)),
        (replace(LOKR, targets=("to_q",)), replace(SPEC, targets=("to_v",))),
    ],
    ids=["on the same layers", "lokr and lora on unlike ones"],
)
def test_two_act_together(first: LoraConfig, second: LoraConfig) -> None:
    both, whole = network(), network()
    for name, config, scale in (("a", first, 1.0), ("b", second, 2.0)):
        layers = lora_layers(trained(config))
        add_layers(both, layers, scale, name)
        merge_layers(whole, layers, scale)
        assert torch.allclose(output(both), output(whole), atol=1e-5)


def test_a_lokr_and_a_dora_need_layers_without_another() -> None:
    for first, second in ((SPEC, LOKR), (LOKR, SPEC), (LOKR, LOKR), (SPEC, DORA)):
        module = network()
        add_layers(module, lora_layers(trained(first)), adapter_name="a")
        with pytest.raises(UsageError, match=rf"--lora: 4 .*: {Q}, "):
            add_layers(module, lora_layers(trained(second)), adapter_name="b")


def test_other_types_than_lora_are_for_linear_layers_and_lokr_for_those_as_loaded() -> (
    None
):
    layer = nn.Linear(64, 64)
    stored = halved(layer, layer.weight.detach())
    for lora_type, module, word in (
        ("dora", nn.Conv2d(4, 4, 3), "Conv2d"),
        ("lokr", nn.Conv2d(4, 4, 3), "Conv2d"),
        ("lokr", stored, "another form"),
    ):
        config = LoraConfig("net", ("0",), 1, 1.0, type=lora_type)
        with pytest.raises(UsageError, match=f"--lora_type: .*{word}"):
            inject(nn.Sequential(module), config, {})
    plain = nn.Sequential(nn.Linear(64, 64))
    inject(plain, replace(config, type="lokr"), {})
    with pytest.raises(UsageError, match=r"--lora: .*quantized"):
        add_layers(nn.Sequential(stored), lora_layers(plain))


def test_one_layer_is_added_where_its_name_ends_another() -> None:
    def net() -> Any:
        pair = {"out": nn.Linear(2, 2), "a": nn.ModuleDict({"out": nn.Linear(2, 2)})}
        return nn.ModuleDict(pair)

    source, module = net(), net()
    inject(source, LoraConfig("net", ("out",), 1, 1.0), {})
    layer = lora_layers(source)["out"]
    add_layers(module, {"out": layer})
    assert list(lora_layers(module)) == ["out"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Embedding(5, 3), torch.arange(5)),
        (lambda: nn.Conv2d(2, 3, 3), torch.arange(32.0).reshape(1, 2, 4, 4)),
    ],
    ids=["embedding", "convolution"],
)
def test_lora_of_an_embedding_and_of_a_convolution_is_saved_added_and_merged(
    make: Callable[[], nn.Module], x: torch.Tensor, tmp_path: Path
) -> None:
    def net() -> Any:
        torch.manual_seed(0)
        return nn.ModuleDict({"own": make()})

    config, module, path = LoraConfig("dit", ("own",), 2, 3.0), net(), tmp_path / "a"
    inject(module, config, {})
    for tensor in lora_state(module).values():
        tensor.copy_(torch.randn(tensor.shape))
    save_lora(path, module, config, "transformer", {})
    (lora,) = read_lora(LoraFile(path), MODEL, {"dit": base_shapes(net())})
    added, whole = net(), net()
    add_layers(added, lora.layers)
    merge_layers(whole, lora.layers)
    # Below the layers that are added, too.
    merge_layers(added, lora.layers, -1.0)
    wanted = module["own"](x)
    assert torch.allclose(whole["own"](x), wanted, atol=1e-5)
    assert torch.allclose(added["own"](x), net()["own"](x), atol=1e-4)
    assert not torch.allclose(wanted, net()["own"](x), atol=1e-2)
    weight = net()["own"].weight
    assert merged(net()["own"], weight, lora.layers["own"]).is_contiguous()
