"""The blocks that a network repeats are found, and an adapter acts around them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from dstrain.models.execution import enable_checkpointing, repeated_blocks
from dstrain.plugin.functional import around_blocks
from torch import Tensor, nn

NAMES = ["transformer_blocks.0", "transformer_blocks.1", "single_transformer_blocks.0"]


@pytest.fixture
def network() -> Any:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )


class Block(nn.Module):
    """A block with blocks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])


class Network(nn.Module):
    """A network as plugins write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.mixed = nn.ModuleList([nn.Linear(1, 1), nn.LayerNorm(1)])
        self.alone = nn.ModuleList([Block()])
        self.empty = nn.ModuleList([nn.Identity(), nn.Identity()])


def test_blocks_are_the_equal_modules_of_a_list_and_none_is_inside_another() -> None:
    network = Network()
    own = {f"blocks.{number}": network.blocks[number] for number in range(3)}
    # Those of the list that has one block alone are repeated in it.
    parts = network.alone[0].parts
    own |= {"alone.0.parts.0": parts[0], "alone.0.parts.1": parts[1]}
    assert repeated_blocks(network) == own
    assert not repeated_blocks(nn.Sequential(nn.Linear(1, 1)))


def predict(network: nn.Module) -> Tensor:
    """The network's prediction for the same noise each time."""
    generator = torch.Generator().manual_seed(1)
    prediction: Tensor = network(
        hidden_states=torch.randn(1, 4, 8, generator=generator),
        encoder_hidden_states=torch.randn(1, 3, 8, generator=generator),
        pooled_projections=torch.randn(1, 8, generator=generator),
        timestep=torch.tensor([0.5]),
        img_ids=torch.zeros(4, 3),
        txt_ids=torch.zeros(3, 3),
        return_dict=False,
    )[0]
    return prediction


def adding(adapter: nn.Linear, called: list[str]) -> Callable[..., Any]:
    """Add what an adapter makes of a block's image tokens to them."""

    def call(name: str, block: Any, *arguments: Any, **named: Any) -> Any:
        called.append(name)
        text, image = block(*arguments, **named)
        return text, image + adapter(image)

    return call


def train(network: nn.Module, adapter: nn.Linear) -> tuple[list[str], list[Tensor]]:
    """Return the blocks called around, and the gradients of adapter and network."""
    called: list[str] = []
    with around_blocks(network, adding(adapter, called)):
        prediction = predict(network)
    prediction.square().mean().backward()
    gradients = [one.grad for one in (*adapter.parameters(), *network.parameters())]
    return called, [one for one in gradients if one is not None]


@pytest.mark.parametrize("offload", [False, True])
def test_an_adapter_gets_the_same_gradients_where_blocks_are_recomputed(
    network: nn.Module, offload: bool
) -> None:
    torch.manual_seed(2)
    adapter = nn.Linear(16, 16)
    called, plain = train(network, adapter)
    assert called == NAMES
    network.zero_grad()
    adapter.zero_grad()
    network.train()
    enable_checkpointing("dit", network, offload)
    called, recomputed = train(network, adapter)
    assert called == NAMES + NAMES[::-1]
    called = []
    with torch.no_grad(), around_blocks(network, adding(adapter, called)):
        predict(network)  # as previews do, while training
    assert called == NAMES
    assert len(plain) == len(recomputed) > 20
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)
    assert train(network, adapter)[0] == NAMES + NAMES[::-1]  # the next step, too


def test_hooks_of_a_block_are_called_once_and_the_network_is_as_before_after_an_error(
    network: Any,
) -> None:
    calls: list[nn.Module] = []
    before = predict(network)
    for block in network.transformer_blocks:
        block.register_forward_hook(lambda module, *_: calls.append(module))
    with around_blocks(network, adding(nn.Linear(16, 16), [])), torch.no_grad():
        predict(network)
    assert len(calls) == 2
    with pytest.raises(TypeError), around_blocks(network, lambda name: name):
        predict(network)
    assert torch.equal(predict(network), before)
