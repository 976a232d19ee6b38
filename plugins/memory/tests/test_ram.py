"""Weights in RAM come back bit for bit, whatever their form, and leave no memory behind."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain_memory.ram import ComponentInRam, WeightsInRam, _pin, stored_tensors
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.poisoned_memory import poisoned_memory

CPU = torch.device("cpu")
LARGEST = {torch.bool: 1, torch.uint8: 255, torch.int64: 2**63 - 1}
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, *LARGEST)


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_every_dtype_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    """Those that are absent have a shape and no numbers."""
    tensors = [numbers(dtype, 3, 5), numbers(dtype), numbers(dtype, 0, 2)]
    wanted = [tensor.clone() for tensor in tensors]
    ram = WeightsInRam(tensors, CPU)
    for _ in range(2):
        ram.load()
        for tensor, want in zip(tensors, wanted, strict=True):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, want)
            assert tensor.data_ptr() % 64 == 0  # as torch's own tensors are aligned
        ram.drop()
        weight = tensors[0]
        assert (weight.shape, weight.dtype) == ((3, 5), dtype)
        assert weight.untyped_storage().nbytes() == dtype.itemsize
        if dtype.is_floating_point:
            assert weight.float().isnan().all()
        else:
            assert (weight.float() == LARGEST[dtype]).all()


def test_a_piece_has_the_bytes_of_its_weights_and_its_copy_is_freed() -> None:
    ram = WeightsInRam([torch.zeros(3), numbers(torch.float32, 64, 4)], CPU)
    assert ram.nbytes == 256 + 1024  # they are aligned
    storage = StorageWeakRef(ram.load().untyped_storage())
    assert not storage.expired()
    ram.drop()
    assert storage.expired()


def test_where_memory_cannot_be_locked_its_error_ends_no_later_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA keeps an error until torch asks for it, after the next kernel."""
    kept: list[str] = []

    def refuse(*given: int) -> int:
        kept.append("out of memory")
        return 2

    def kernel(*given: Any, **named: Any) -> None:
        if kept:
            raise RuntimeError(kept.pop())

    runtime = SimpleNamespace(cudaHostRegister=refuse)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", kernel)
    _pin(torch.ones(2), CPU)
    assert kept == []


@pytest.mark.parametrize("is_loaded", [False, True])
def test_weights_can_be_read_without_the_device(is_loaded: bool) -> None:
    weight = torch.ones(3)
    ram = WeightsInRam([weight], CPU)
    if is_loaded:
        ram.load()
    with ram.readable():
        assert weight.tolist() == [1, 1, 1]
    assert weight.isfinite().all() == is_loaded


class Wrapped(nn.Parameter):
    """A weight that is made of two tensors, as torchao's are."""

    packed: Tensor
    scale: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "scale"], None


class Packed(nn.Parameter):
    """A weight with a state beside it, as those of bitsandbytes are."""

    quant_state: Any = None


class State:
    """Scales, of which there may be scales again."""

    def __init__(self, absmax: Tensor, state2: "State | None") -> None:
        self.absmax, self.shape, self.state2 = absmax, (2, 2), state2


def ids(tensors: Iterable[Tensor]) -> list[int]:
    return [id(tensor) for tensor in tensors]


def test_a_weight_is_what_it_is_made_of() -> None:
    wrapped = Wrapped(torch.ones(2, 2), requires_grad=False)
    wrapped.packed, wrapped.scale = torch.ones(2), torch.ones(1)
    packed = Packed(torch.ones(2), requires_grad=False)
    inner = State(torch.ones(1), None)
    packed.quant_state = State(torch.ones(2), inner)
    for weight, parts in (
        (wrapped, [wrapped.packed, wrapped.scale]),
        (packed, [packed, packed.quant_state.absmax, inner.absmax]),
    ):
        module = nn.Module()
        module.__dict__["_parameters"] = {"weight": weight}
        assert ids(stored_tensors(module)) == ids(parts)


def test_what_is_trained_or_held_elsewhere_stays() -> None:
    network: Any = nn.Module()
    for name in ("first", "block", "blockade"):
        network.add_module(name, nn.Linear(2, 2))
    block = network.block
    block.register_buffer("scale", torch.ones(2), persistent=False)
    block.twice = block.scale
    network.requires_grad_(False)
    block.bias.requires_grad_(True)
    assert ids(stored_tensors(network, "block")) == ids([block.weight, block.scale])
    network.first.weight = block.weight
    assert ids(stored_tensors(network, "block")) == ids([block.scale])
    assert len(stored_tensors(network)) == 5
    assert len(stored_tensors(network, saved=["blockade.bias"])) == 4


def test_a_component_is_on_the_device_only_while_it_is_borrowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that it has several pieces.
    monkeypatch.setattr("dstrain_memory.ram.PIECE", 16)
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    x = torch.ones(1, 2)
    wanted = network(x)
    component = ComponentInRam(network, CPU)
    with poisoned_memory() as seen:
        for _ in range(2):
            # Two functions may use it, one inside the other.
            with component.on_device():
                with component.on_device():
                    assert torch.equal(network(x), wanted)
                assert torch.equal(network(x), wanted)
            assert seen.now == 0
            assert network(x).isnan().all()
            with component.readable():
                assert torch.equal(network(x), wanted)
    assert seen.loads == 2 * 3
    with pytest.raises(ZeroDivisionError), component.on_device():
        _ = 1 / 0
    assert network[0].weight.isnan().all()
