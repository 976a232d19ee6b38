"""The blocks that a network repeats are found, whoever wrote it, and none inside another."""

import pytest
from diffusers import FluxTransformer2DModel
from dstrain.models.execution import repeated_blocks
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel


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


def test_blocks_are_the_equal_modules_of_a_list() -> None:
    network = Network()
    found = repeated_blocks(network)
    own = {f"blocks.{number}": network.blocks[number] for number in range(3)}
    # Those of the list that has one block alone are repeated in it.
    parts = network.alone[0].parts
    assert found == {**own, "alone.0.parts.0": parts[0], "alone.0.parts.1": parts[1]}


def test_a_network_of_diffusers_names_its_blocks() -> None:
    network = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=8,
        num_attention_heads=1,
        joint_attention_dim=4,
        pooled_projection_dim=4,
        axes_dims_rope=(2, 2, 4),
    )
    double = [f"transformer_blocks.{number}" for number in range(2)]
    single = [f"single_transformer_blocks.{number}" for number in range(3)]
    assert [*repeated_blocks(network)] == double + single


def test_layers_of_a_network_of_transformers_are_found() -> None:
    config = CLIPTextConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
    )
    names = [*repeated_blocks(CLIPTextModel(config))]
    assert [name.rpartition("encoder.")[2] for name in names] == [
        "layers.0",
        "layers.1",
    ]


@pytest.mark.parametrize("network", [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))])
def test_a_network_may_repeat_nothing(network: nn.Module) -> None:
    assert not repeated_blocks(network)
