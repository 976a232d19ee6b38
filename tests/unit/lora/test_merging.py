"""Layers of every type are merged in fp32, and a weight keeps its dtype."""

import pytest
import torch
from dstrain.lora import add_layers, merge_layers, merged
from dstrain.lora.layers import LoraLayer
from dstrain.lora.lokr import Layer, LokrLayer
from torch import nn

THIRD = 1 / 3
LAYERS: tuple[Layer, ...] = (
    LoraLayer(torch.full((1, 6), THIRD), torch.full((8, 1), THIRD), 1.0),
    LoraLayer(torch.full((1, 6), THIRD), torch.full((8, 1), THIRD), 1.0, torch.rand(8)),
    LokrLayer((torch.full((2, 3), THIRD),), (torch.full((4, 2), THIRD),), 1, 1.0),
)


@pytest.mark.parametrize("layer", LAYERS, ids=["lora", "dora", "lokr"])
def test_merging_is_computed_in_fp32_and_keeps_the_dtype(layer: Layer) -> None:
    module = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(6, 8)}).bfloat16()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    merge_layers(module, {"a": layer})
    after = module.state_dict()
    wanted = before["a.weight"].float() + torch.full((8, 6), THIRD * THIRD)
    if layer.type == "dora":
        assert isinstance(layer, LoraLayer) and layer.magnitude is not None
        wanted *= (layer.magnitude / wanted.norm(dim=1))[:, None]
    assert torch.equal(after["a.weight"], wanted.bfloat16())
    assert torch.equal(after["b.weight"], before["b.weight"])


@pytest.mark.parametrize("layer", LAYERS, ids=["lora", "dora", "lokr"])
def test_a_strength_scales_the_whole_change(layer: Layer) -> None:
    module = nn.ModuleDict({"a": nn.Linear(6, 8)})
    before = module["a"].weight.detach().clone()
    merge_layers(module, {"a": layer}, 0.25)
    wanted = before + 0.25 * (layer.changed(before) - before)
    assert torch.equal(module["a"].weight, wanted)


def test_layers_are_merged_below_those_that_peft_added() -> None:
    module = nn.Sequential(nn.Linear(6, 8))
    before = module[0].weight.detach().clone()
    add_layers(module, {"0": LAYERS[0]})
    merge_layers(module, {"0": LAYERS[2]})
    assert torch.equal(module[0].base_layer.weight, LAYERS[2].changed(before))


def test_an_embedding_below_lora_layers_is_the_other_way_round_too() -> None:
    module = nn.Sequential(nn.Embedding(5, 3))
    layer = LoraLayer(torch.randn(2, 5), torch.randn(3, 2), 2.0)
    before = module[0].weight.detach().clone()
    add_layers(module, {"0": layer})
    merge_layers(module, {"0": layer})
    wanted = before + (layer.up @ layer.down).T
    assert torch.allclose(module[0].base_layer.weight, wanted, atol=1e-6)


def test_the_weight_of_an_embedding_is_the_other_way_round() -> None:
    embedding = nn.Embedding(5, 3)
    layer = LoraLayer(torch.randn(2, 5), torch.randn(3, 2), 2.0)
    with torch.no_grad():
        found = merged(embedding, embedding.weight, layer)
        wanted = embedding.weight + (layer.up @ layer.down).T
    assert torch.equal(found, wanted) and found.is_contiguous()
