"""Layers that a file has as one are joined and split exactly, DoRA too."""

import pytest
import torch
from dstrain import UsageError
from dstrain.lora.fusing import fuse, split_fused
from dstrain.lora.key_names import Rows
from dstrain.lora.layers import LoraLayer
from torch import Tensor

ROWS = (Rows("q", 0, 4, 0), Rows("k", 4, 6, 0), Rows("q", 6, 8, 4))
"""`q` has its rows in two places."""


def layers() -> dict[str, LoraLayer]:
    draw = torch.Generator().manual_seed(4)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    return {
        "q": LoraLayer(numbers(2, 5), numbers(6, 2), 2.0, numbers(6).abs()),
        "k": LoraLayer(numbers(3, 5), numbers(2, 3), 3.0, numbers(2).abs()),
    }


def test_dora_of_several_layers_acts_as_one_and_comes_back() -> None:
    parts = layers()
    weights = {"q": torch.randn(6, 5), "k": torch.randn(2, 5)}
    together = torch.cat([weights["q"][:4], weights["k"], weights["q"][4:]])
    one = fuse(parts, ROWS)
    changed = {name: layer.changed(weights[name]) for name, layer in parts.items()}
    wanted = torch.cat([changed["q"][:4], changed["k"], changed["q"][4:]])
    assert torch.allclose(one.changed(together), wanted, atol=1e-6)
    again = split_fused(one, ROWS)
    for name, layer in parts.items():
        assert torch.equal(again[name].down, layer.down)
        assert torch.equal(again[name].up, layer.up)
        assert again[name].magnitude is not None and layer.magnitude is not None
        assert torch.equal(again[name].magnitude, layer.magnitude)


@pytest.mark.parametrize("shared", [("q", "k", "v"), ("q", "v")])
def test_a_layer_of_several_keeps_its_rank_there_and_back(
    shared: tuple[str, ...],
) -> None:
    """Another program's qkv of rank 4 has one A for all: as three layers and as one
    again it is what it was. Of parts that have their own A, that one alone is added.
    """
    rows = tuple(Rows(name, 4 * i, 4 * i + 4, 0) for i, name in enumerate("qkv"))
    draw = torch.Generator().manual_seed(1)
    down = torch.randn(4, 5, generator=draw)
    parts = {
        name: LoraLayer(
            down if name in shared else torch.randn(4, 5, generator=draw),
            torch.randn(4, 4, generator=draw),
            2.0,
        )
        for name in "qkv"
    }
    one = fuse(parts, rows)
    assert one.rank == 4 * (4 - len(shared))
    weight = torch.randn(12, 5, generator=draw)
    wanted = [parts[name].changed(weight[4 * i :][:4]) for i, name in enumerate("qkv")]
    assert torch.allclose(one.changed(weight), torch.cat(wanted), atol=1e-6)
    if len(shared) == 3:
        again = fuse(split_fused(one, rows), rows)
        assert torch.equal(again.down, one.down) and torch.equal(again.up, one.up)


def test_layers_of_unlike_dtypes_are_joined() -> None:
    down = torch.ones(2, 5)
    parts = {
        "q": LoraLayer(down, torch.ones(6, 2), 2.0),
        "k": LoraLayer(down.half(), torch.ones(2, 2), 2.0),
    }
    assert fuse(parts, ROWS).up.shape == (8, 4)


def test_dora_of_a_part_alone_is_refused() -> None:
    """LoRA is not: rows without it stay as they are."""
    parts = layers()
    del parts["k"]
    with pytest.raises(UsageError, match=r"one layer for q, k, not all with .*\n.*: k"):
        fuse(parts, ROWS)
    plain = {"q": LoraLayer(parts["q"].down, parts["q"].up, 2.0)}
    assert set(split_fused(fuse(plain, ROWS), ROWS)) == {"q"}


def test_a_part_whose_product_is_zero_keeps_its_lengths() -> None:
    parts = layers()
    parts["k"].up.zero_()
    again = split_fused(fuse(parts, ROWS), ROWS)
    assert again["k"].magnitude is not None
    assert torch.equal(again["k"].magnitude, layers()["k"].magnitude)
    assert not again["k"].up.any()
