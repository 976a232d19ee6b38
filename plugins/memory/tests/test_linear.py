"""A layer with a stored weight computes, forward and backward, the bits that a plain layer
computes with the restored weight, and autograd keeps no restored weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dstrain import LoraConfig
from dstrain.lora import inject, lora_state
from dstrain_memory.quantization.known_methods import METHODS
from dstrain_memory.quantization.linear import QuantizedLinear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

METHOD_NAMES = tuple(METHODS)
BF16 = torch.bfloat16


def pair(
    method: str, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[QuantizedLinear, nn.Linear]:
    """A stored layer of 72 inputs, and the plain one with its restored weight."""
    torch.manual_seed(0)
    layer = nn.Linear(72, 16, bias=bias, dtype=dtype).requires_grad_(False)
    plain = nn.Linear(72, 16, bias=bias, dtype=dtype).requires_grad_(False)
    stored = METHODS[method].store(layer, layer.weight.detach())
    assert isinstance(stored, QuantizedLinear)
    plain.weight.data = stored.restored().clone()
    if bias:
        plain.bias.data = layer.bias.detach().clone()
    return stored, plain


def outcome(layer: nn.Module, x: Tensor, autocast: bool) -> tuple[Tensor, Tensor]:
    """The layer's result and the gradient of a loss to its input."""
    x = x.clone().requires_grad_(True)
    with torch.autocast("cpu", BF16, enabled=autocast):
        y = layer(x)
    (y.float() ** 2).sum().backward()
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (BF16, False), (BF16, True), (torch.float32, True)],
    ids=["fp32", "bf16", "bf16 under autocast", "fp32 under autocast"],
)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_results_and_gradients_are_those_of_the_restored_weight(
    method: str, dtype: torch.dtype, autocast: bool, bias: bool
) -> None:
    stored, plain = pair(method, bias, dtype)
    for shape in ((72,), (3, 72), (2, 5, 72), (1, 2, 3, 72)):
        x = torch.randn(shape).to(torch.float32 if autocast else dtype)
        got, want = outcome(stored, x, autocast), outcome(plain, x, autocast)
        for one, other in zip(got, want, strict=True):
            # torch.equal: a NaN is never equal.
            assert one.dtype == other.dtype and torch.equal(one, other)
    assert torch.equal(stored(x.to(dtype)), plain(x.to(dtype)))


@contextmanager
def kept(into: dict[int, Tensor]) -> Iterator[None]:
    """Note every tensor that autograd keeps for the backward pass."""

    def pack(tensor: Tensor) -> Tensor:
        into[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


@pytest.mark.parametrize("is_checkpointed", [True, False])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_autograd_keeps_the_stored_weight_and_no_restored_one(
    method: str, is_checkpointed: bool
) -> None:
    stored, plain = pair(method)
    own = {one.untyped_storage().data_ptr() for one in stored.stored}
    x = torch.randn(3, 72, requires_grad=True)
    found: dict[int, Tensor] = {}
    with kept(found):
        if is_checkpointed:
            y = checkpoint(stored, x, use_reentrant=False)
        else:
            y = stored(x)
    y.sum().backward()
    others = [one for place, one in found.items() if place not in own]
    assert sum(one.numel() for one in others) <= x.numel()
    # A plain layer is seen to keep its weight.
    with kept(found):
        plain(x)
    assert plain.weight.data_ptr() in found


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_bytes_are_those_that_the_method_names_and_names_stay(method: str) -> None:
    """A change of dtype leaves scales."""
    stored, plain = pair(method)
    size = sum(one.nbytes for one in stored.stored)
    assert size == METHODS[method].stored_bytes((16, 72))
    assert (stored.in_features, stored.out_features) == (72, 16)
    before = stored.restored()
    assert list(stored.state_dict()) == list(plain.state_dict())
    assert not any(one.requires_grad for one in stored.parameters())
    stored.to(BF16)
    assert torch.equal(stored.restored(), before)
    assert stored.weight.dtype == torch.int8


class Net(nn.Module):
    """Two layers, the first stored."""

    def __init__(self, first: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.to_q = first
        self.to_out = nn.Linear(16, 72, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.to_out(self.to_q(x).tanh())
        return y


def with_lora(first: nn.Module, dtype: torch.dtype, lora_type: str = "lora") -> Net:
    net = Net(first, dtype)
    torch.manual_seed(2)
    inject(net, LoraConfig("net", ("to_q", "to_out"), 4, 4.0, type=lora_type), {})
    return net


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("lora_type", ["lora", "dora"])
def test_lora_starts_and_trains_as_on_the_restored_weight(
    lora_type: str, method: str, dtype: torch.dtype
) -> None:
    results: list[Any] = []
    for layer in pair(method, dtype=dtype):
        net = with_lora(layer, dtype, lora_type)
        for name, weight in lora_state(net).items():
            assert weight.dtype == torch.float32
            if ".lora_B" in name:
                weight.data.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
        x = torch.linspace(-1, 1, 5 * 72).view(5, 72)
        with torch.autocast("cpu", BF16, enabled=dtype == BF16):
            (net(x).float() ** 2).sum().backward()
        trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
        results.append({name: (p.detach(), p.grad) for name, p in trained.items()})
    got, want = results
    assert got.keys() == want.keys() and got
    for name, tensors in want.items():
        for one, other in zip(got[name], tensors, strict=True):
            assert torch.equal(one, other), name


def test_lora_starts_from_the_same_numbers_whatever_the_layer_is_stored_as() -> None:
    starts = []
    for dtype in (torch.float32, BF16):
        layers = [pair("fp8", dtype=dtype)[1]]
        layers += [pair(method, dtype=dtype)[0] for method in METHOD_NAMES]
        starts += [lora_state(with_lora(layer, dtype)) for layer in layers]
    for one in starts:
        for name, weight in one.items():
            assert torch.equal(weight, starts[0][name]), name
    first = starts[0]["to_q.lora_A.weight"]
    assert first.unique().numel() == first.numel()
