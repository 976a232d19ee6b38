"""Layers in training are filled from a file only if it is exactly for them."""

from pathlib import Path

import pytest
import torch
from dstrain import StateError
from dstrain.lora import load_layers
from dstrain.lora.initial_layers import fill
from dstrain.lora.layers import LoraLayer
from dstrain.lora.lokr import Layer, LokrLayer

PATH = Path("x.safetensors")


def lora(rank: int = 2, alpha: float = 3.0) -> LoraLayer:
    return LoraLayer(torch.randn(rank, 6), torch.randn(4, rank), alpha)


def dora() -> LoraLayer:
    return LoraLayer(torch.randn(2, 6), torch.randn(4, 2), 3.0, torch.rand(4))


def lokr(rows: int = 2, alpha: float = 2.0) -> LokrLayer:
    first = torch.randn(rows, 2)
    return LokrLayer((first,), (torch.randn(2, 1), torch.randn(1, 3)), 1, alpha)


@pytest.mark.parametrize(
    ("own", "given", "words"),
    [
        ({"a": lora()}, {"a": dora()}, "contains dora, .* are lora\n  give --lora_type"),
        ({"a": dora()}, {"a": lokr()}, "contains lokr, .* are dora"),
        ({"a": lora()}, {"a": lora(3)}, "has rank 3, .* 2\n  give --lora_rank 3"),
        ({"a": lora()}, {"a": lora(2, 4.0)}, "has alpha 4, .* 3\n  give --lora_alpha 4"),
        (
            {"a": lora(), "b": lora(4)},
            {"a": lora(), "b": lora(3)},
            r"has rank 3 of b, which is to be trained with 4\n.*PATTERN=NUMBER",
        ),
        ({"a": lokr()}, {"a": lokr(4)}, r"has LoKr of a .* \(4, 2\),.*--lokr_factor"),
        ({"a": lora(), "b": lora()}, {"a": lora()}, "1 layer trained but not in the"),
        ({"a": lora()}, {"a": lora(), "b": lora()}, "1 layer in the file but not tr"),
    ],
)  # fmt: skip
def test_what_differs_is_refused_with_what_to_give(
    own: dict[str, Layer], given: dict[str, Layer], words: str
) -> None:
    with pytest.raises(StateError, match=f"(?s){words}"):
        load_layers(own, given, PATH)


@pytest.mark.parametrize("make", [lora, dora, lokr])
def test_a_layer_is_copied_into_the_memory_of_the_one_in_training(make: object) -> None:
    assert callable(make)
    own, given = make(), make()
    weight = torch.randn(4, 6)
    assert not torch.equal(own.changed(weight), given.changed(weight))
    load_layers({"a": own}, {"a": given}, PATH)
    assert torch.equal(own.changed(weight), given.changed(weight))


def test_a_lokr_of_another_scale_keeps_its_effect() -> None:
    own, given = lokr(alpha=0.5), lokr(alpha=3.0)
    fill(own, given)
    weight = torch.randn(4, 6)
    assert torch.allclose(own.changed(weight), given.changed(weight), atol=1e-6)
    assert own.alpha == 0.5
