"""Tensors without memory compute shapes among real ones, and their bytes are followed."""

import torch
from dstrain.graph.values import PLAIN_TENSORS
from dstrain.runs.memory.without_memory import WithoutMemory, make_fake, without_memory
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def fake(mode: WithoutMemory, *shape: int) -> Tensor:
    return mode.empty(torch.empty(shape, device="meta"))


def test_what_has_no_weights_in_it_is_computed() -> None:
    with without_memory() as mode:
        mask = torch.tensor([[True, False, True]])
        assert not isinstance(mask, FakeTensor)
        assert int(mask.sum()) == 2
        states = fake(mode, 1, 3, 8) * 2
        assert states[mask].shape == (2, 8)
        assert isinstance(states[mask], FakeTensor)


def test_a_large_tensor_takes_no_memory() -> None:
    with without_memory():
        assert isinstance(torch.zeros(2**20, 2**20), FakeTensor)
        pixels = torch.zeros((), dtype=torch.uint8).expand(2**20, 2**10, 3)
        assert isinstance(pixels.float(), FakeTensor)


def test_bytes_are_followed_until_nothing_holds_them() -> None:
    with without_memory() as mode:
        first = fake(mode, 256) + 1
        second = first.double()
        view = second[:16]
        assert (mode.live, mode.peak, mode.largest) == (3072, 3072, 2048)
        del first, second
        assert mode.live == 2048
        del view
        assert (mode.live, mode.peak) == (0, 3072)


def test_weights_become_fakes_of_the_dtype_they_are_kept_in() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("meta")
    network[0].requires_grad_(False).bfloat16()
    network[0].register_buffer("scale", torch.ones(4))
    network[0].tied = network[0].weight
    with without_memory() as mode:
        keys = make_fake(mode, network)
        assert len(keys) == 5
        assert mode.live == 0
        dtypes = {name: value.dtype for name, value in network.named_parameters()}
        assert dtypes["0.weight"] == dtypes["0.bias"] == torch.bfloat16
        assert dtypes["1.weight"] == network[0].scale.dtype == torch.float32
        assert network[0].tied is network[0].weight
        assert network[1].weight.requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert network(fake(mode, 2, 4)).dtype == torch.bfloat16


def test_units_may_return_fakes_in_the_mode_alone() -> None:
    assert FakeTensor not in PLAIN_TENSORS.get()
    with without_memory():
        assert FakeTensor in PLAIN_TENSORS.get()
    assert FakeTensor not in PLAIN_TENSORS.get()
