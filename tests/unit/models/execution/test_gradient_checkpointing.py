"""Checkpointed blocks compute the same gradients, and networks are switched on."""

from typing import Any

import pytest
import torch
from dstrain import UsageError, gradient_checkpoint_forward
from dstrain.models.execution import enable_checkpointing
from dstrain.models.execution.gradient_checkpointing import checkpoint_in_ram
from torch import Tensor, nn


@pytest.mark.parametrize(
    ("plain", "offload"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_a_block_can_be_called_with_checkpointing_by_its_author(
    plain: bool, offload: bool
) -> None:
    torch.manual_seed(0)
    block, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)),
        torch.randn(2, 4, requires_grad=True),
    )
    calls = 0

    def call(value: Tensor, scale: float = 1.0) -> Tensor:
        nonlocal calls
        calls += 1
        out: Tensor = block(value) * scale
        return out

    torch.manual_seed(1)
    call(x, scale=3.0).sum().backward()
    assert x.grad is not None
    wanted, x.grad, calls = x.grad.clone(), None, 0
    torch.manual_seed(1)
    gradient_checkpoint_forward(call, plain, offload, x, scale=3.0).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)
    assert calls == 1 + (plain or offload)


@pytest.mark.parametrize(
    "method", ["gradient_checkpointing_enable", "activation_checkpointing_enable"]
)
def test_a_network_of_transformers_is_switched_on_in_each_layer(method: str) -> None:
    class Layer(nn.Module):
        _gradient_checkpointing_func: Any = None

    network = nn.Sequential(Layer(), Layer())
    given: list[dict[str, bool]] = []
    setattr(network, method, given.append)
    enable_checkpointing("text_encoder", network, offload=True)
    assert given == [{"use_reentrant": False}]
    assert [layer._gradient_checkpointing_func for layer in network] == [
        checkpoint_in_ram
    ] * 2


def test_a_network_that_cannot_checkpoint_is_named() -> None:
    with pytest.raises(UsageError, match=r"vae \(Linear\) does not support it"):
        enable_checkpointing("vae", nn.Linear(1, 1), offload=False)
