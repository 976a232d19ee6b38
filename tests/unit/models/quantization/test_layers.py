"""Which layers are stored follows from patterns; each is stored as soon as it is read."""

from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.models import StoredLinear
from dstrain.models.execution import Kept, StoredLayers
from dstrain.models.networks import put
from dstrain.models.quantization.layers import LayerStore, methods_of_layers
from dstrain.models.quantization.methods import FP8, INT8_BLOCK
from torch import nn


class Net(nn.Module):
    """Two blocks between an embedder and a final layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.proj_in = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"to_q": nn.Linear(8, 8, bias), "mod": nn.Linear(8, 16)})
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)


ENDS = ("proj_in", "head")
LAYERS = "its layers: blocks.0.to_q, blocks.0.mod, blocks.1.to_q, ..."


def stored(*entries: StoredLayers, network: nn.Module | None = None) -> dict[str, str]:
    kept = Kept(entries, unquantized=ENDS)
    found = methods_of_layers(network or Net(), kept, "dit")
    return {name: method.name for name, method in found.items()}


def test_all_linear_layers_are_stored_but_those_that_the_record_leaves() -> None:
    inner = ["blocks.0.to_q", "blocks.0.mod", "blocks.1.to_q", "blocks.1.mod"]
    assert stored(StoredLayers(FP8)) == dict.fromkeys(inner, "fp8")
    assert stored() == {}


def test_patterns_choose_layers_for_each_method() -> None:
    found = stored(StoredLayers(FP8, (), ("mod",)), StoredLayers(INT8_BLOCK, ("mod",)))
    assert found == {
        "blocks.0.to_q": "fp8",
        "blocks.0.mod": "int8_block",
        "blocks.1.to_q": "fp8",
        "blocks.1.mod": "int8_block",
    }
    only = StoredLayers(FP8, ("blocks.*.to_q",), ("blocks.1.to_q",))
    assert stored(only) == {"blocks.0.to_q": "fp8"}


def test_one_method_may_store_a_layer_twice() -> None:
    assert stored(StoredLayers(FP8), StoredLayers(FP8, ("mod",))) == stored(
        StoredLayers(FP8)
    )


@pytest.mark.parametrize(
    ("entry", "what", "help_line"),
    [
        (
            StoredLayers(FP8, ("to_qq",)),
            "dit:fp8@to_qq: no linear layer of dit matches 'to_qq'; did you mean 'to_q'?",
            LAYERS,
        ),
        (
            StoredLayers(FP8, (), ("norm",)),
            "dit:fp8/norm: no linear layer of dit matches 'norm'",
            LAYERS,
        ),
        (
            StoredLayers(FP8, ("head",)),
            "dit:fp8@head: 'head' is a layer of dit that always stays as it is loaded",
            "leave it out",
        ),
    ],
    ids=["only", "excluded", "left by the record"],
)
def test_a_pattern_that_matches_no_layer_is_refused(
    entry: StoredLayers, what: str, help_line: str
) -> None:
    with pytest.raises(UsageError) as caught:
        stored(entry)
    assert (caught.value.what, caught.value.help_lines) == (what, (help_line,))


def test_a_layer_that_always_stays_may_be_excluded() -> None:
    assert stored(StoredLayers(FP8, (), ("head",))) == stored(StoredLayers(FP8))


def test_a_layer_of_two_methods_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"both dit:fp8 and dit:int8_block@mod quantize"
    ):
        stored(StoredLayers(FP8), StoredLayers(INT8_BLOCK, ("mod",)))


def test_a_network_without_such_layers_is_refused() -> None:
    with pytest.raises(
        UsageError, match="dit has no linear layer that can be quantized"
    ):
        stored(StoredLayers(FP8), network=nn.Sequential(nn.Conv2d(3, 3, 1)))


def test_files_without_such_layers_may_be_among_those_that_a_flag_names() -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 1))
    assert stored(StoredLayers(FP8, is_among_others=True), network=network) == {}


def test_a_fault_names_the_flag_that_it_came_from() -> None:
    first = StoredLayers(FP8, flag="--fp8_models")
    for entries, flag in (
        ((first, StoredLayers(INT8_BLOCK, ("mod",))), "--quant_options"),
        ((StoredLayers(FP8, ("head",), flag="--fp8_models"),), "--fp8_models"),
    ):
        with pytest.raises(UsageError) as caught:
            stored(*entries)
        assert caught.value.where == flag


def test_a_weight_that_is_also_anothers_stays() -> None:
    network: Any = Net()
    network.all_tied_weights_keys = {"blocks.0.to_q.weight": "blocks.1.to_q.weight"}
    assert list(stored(StoredLayers(FP8), network=network)) == [
        "blocks.0.mod",
        "blocks.1.mod",
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backwards", [True, False])
def test_weights_are_stored_in_whatever_order_they_are_read(
    bias: bool, backwards: bool
) -> None:
    torch.manual_seed(0)
    source = Net(bias).requires_grad_(False)
    with torch.device("meta"):
        network = Net(bias)
    entries = StoredLayers(FP8, (), ("mod",)), StoredLayers(INT8_BLOCK, ("mod",))
    store = LayerStore(Kept(entries, unquantized=ENDS), "dit")
    weights = [*source.state_dict().items()]
    for name, weight in reversed(weights) if backwards else weights:
        put(network, name, store(network, name, weight.clone()))
    assert not any(one.is_meta for one in network.parameters())
    assert list(network.state_dict()) == list(source.state_dict())
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        plain = source.get_submodule(name)
        assert isinstance(plain, nn.Linear)
        assert isinstance(layer, StoredLinear) == (name not in ENDS)
        weight = layer.restored() if isinstance(layer, StoredLinear) else layer.weight
        assert torch.allclose(weight, plain.weight, atol=0.02)
        assert (layer.bias is None) == (plain.bias is None)
        assert plain.bias is None or torch.equal(layer.bias, plain.bias)


def test_without_methods_weights_stay_what_they_are() -> None:
    weight = torch.ones(8, 8)
    assert LayerStore(Kept(), "dit")(Net(), "blocks.0.to_q.weight", weight) is weight
