"""Checkpointed blocks compute the same gradients, and networks are switched on."""

from typing import Any

import pytest
import torch
from dstrain import gradient_checkpoint_forward
from dstrain.models.execution import checkpoint_through, enable_checkpointing
from torch import Tensor, nn


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_block_can_be_called_with_checkpointing_by_its_author(
    checkpointed: bool, offload: bool
) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    calls = 0

    def call(value: Tensor, scale: float = 1.0) -> Tensor:
        nonlocal calls
        calls += 1
        out: Tensor = block(value) * scale
        return out

    torch.manual_seed(1)
    (wanted,) = torch.autograd.grad(call(x, scale=3.0).sum(), x)
    calls = 0
    torch.manual_seed(1)
    out = gradient_checkpoint_forward(call, checkpointed, offload, x, scale=3.0)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, wanted)
    assert calls == 1 + (checkpointed or offload)


@pytest.mark.parametrize(
    "method", ["gradient_checkpointing_enable", "activation_checkpointing_enable"]
)
def test_a_network_of_transformers_is_switched_on_in_each_layer(method: str) -> None:
    class Layer(nn.Module):
        _gradient_checkpointing_func: Any = None

    network: Any = nn.Sequential(Layer(), Layer())
    given: list[dict[str, bool]] = []
    setattr(network, method, given.append)
    checkpoint_through("text_encoder", network, print)
    assert given == [{"use_reentrant": False}]
    assert [layer._gradient_checkpointing_func for layer in network] == [print] * 2
    calls: list[Tensor] = []

    def noted(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp()

    for offload in (False, True):
        enable_checkpointing("text_encoder", network, offload)
        x = torch.ones(2, requires_grad=True)
        out = network[0]._gradient_checkpointing_func(noted, x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(gradient, x.exp())
        # Computed again in the backward pass.
        assert len(calls) == 2
        calls.clear()
