"""Block swap changes no bit of losses and gradients, under poisoned memory, and holds no
more than two blocks on the device.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from dstrain import UsageError
from dstrain.models.execution import enable_checkpointing, repeated_blocks
from dstrain_memory.block_swap import BlockSwap
from dstrain_memory.ram import WeightsInRam
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from tests.support.family import Dit
from tests.support.poisoned_memory import poisoned_memory

Call = Callable[[nn.Module, int], Tensor]


def drawn(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def tiny(network: nn.Module, step: int) -> Tensor:
    mask = torch.ones(1, 3, dtype=torch.bool)
    return network(drawn(step, 1, 4, 2, 2), torch.ones(1), drawn(step, 1, 3, 8), mask)


def flux(network: nn.Module, step: int) -> Tensor:
    return network(
        hidden_states=drawn(step, 1, 16, 64),
        encoder_hidden_states=drawn(step, 1, 7, 32),
        pooled_projections=drawn(step, 1, 32),
        timestep=torch.full((1,), 0.5),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(7, 3),
        guidance=torch.ones(1),
        return_dict=False,
    )[0]


FLUX = partial(
    FluxTransformer2DModel,
    in_channels=64,
    num_layers=2,
    num_single_layers=3,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    guidance_embeds=True,
    axes_dims_rope=(4, 6, 6),
)
CLIP = CLIPTextConfig(
    vocab_size=8,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
)


def clip(network: nn.Module, step: int) -> Tensor:
    return network(torch.tensor([[step, 1, 2]])).last_hidden_state


class Counting(Dit):
    """Its blocks keep statistics of what they see, and a table that is not saved."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        for number, block in enumerate(self.blocks):
            block.register_buffer("seen", torch.zeros(8))
            block.register_buffer("table", torch.full((8,), 1.0 + number), False)
            block.register_forward_pre_hook(self._count)

    @staticmethod
    def _count(block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens, *others = inputs
        block.get_buffer("seen").add_(tokens.detach().mean((0, 1)))
        return (tokens * block.get_buffer("table"), *others)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Call, int]] = {
    "tiny": (partial(Dit, 8, 4), tiny, 4),
    "blocks with buffers": (Counting, tiny, 4),
    "flux": (FLUX, flux, 5),
    "an encoder of transformers": (partial(CLIPTextModel, CLIP), clip, 4),
}
"""Name -> its network, a call of it, the number of its blocks."""


def block_swap() -> Any:
    """The swapped blocks of a module in training, which are none yet."""
    return BlockSwap(torch.device("cpu"))


def ready(build: Callable[[], nn.Module], offload: bool = False) -> nn.Module:
    """A network whose biases are trained; two calls give the same."""
    torch.manual_seed(0)
    network = build().train()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
        with torch.no_grad():
            parameter.copy_(drawn(len(name), *parameter.shape) * 0.2)
    enable_checkpointing("dit", network, offload)
    return network


def step_of(network: nn.Module, call: Call, step: int) -> dict[str, Tensor]:
    """Make a step; returns its loss and gradients, and the buffers after it."""
    loss = call(network, step).square().mean()
    loss.backward()
    numbers = {"loss": loss.detach()}
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            numbers[name] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return numbers | {name: one.clone() for name, one in network.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all numbers are finite and equal bit for bit."""
    finite = all(value.isfinite().all() for value in (*one.values(), *other.values()))
    equal = all(torch.equal(value, other[name]) for name, value in one.items())
    return finite and one.keys() == other.keys() and equal


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", ["one", "all"])
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_and_gradients_are_those_without_swap_bit_for_bit(
    name: str, share: str, offload: bool
) -> None:
    build, call, blocks = NETWORKS[name]
    count = blocks if share == "all" else 1
    plain, swapped = ready(build, offload), ready(build, offload)
    with poisoned_memory() as seen:
        swap = block_swap()
        swap.add("dit", swapped, count)
        for step in range(3):
            wanted = step_of(plain, call, step)
            assert len(wanted) > blocks
            assert same(step_of(swapped, call, step), wanted)
            swap.release()
            assert seen.now == 0
            assert seen.loads == (step + 1) * 2 * count
        assert seen.most <= 2


@pytest.mark.parametrize("name", ["tiny", "flux"])
def test_weights_that_are_dropped_too_early_are_noticed(name: str) -> None:
    """After their block's recomputation, in place of after its gradients: so the tests
    above do not pass by reading memory that was given back.
    """
    build, call, blocks = NETWORKS[name]
    wanted = step_of(ready(build), call, 0)
    swapped = ready(build)
    swap = block_swap()
    swap.add("dit", swapped, blocks)
    for block in repeated_blocks(swapped).values():
        block.register_forward_hook(lambda *_: swap.release(), always_call=True)
    with poisoned_memory():
        assert not same(step_of(swapped, call, 0), wanted)


def test_a_block_is_on_its_way_while_the_one_before_it_computes() -> None:
    """In the forward pass and, backwards, in the backward pass."""
    turns: list[tuple[int, bool]] = []
    network = ready(partial(Dit, 8, 3))
    swap = block_swap()
    for number, block in enumerate(network.blocks):

        def note(*_: object, number: int = number) -> None:
            turns.append((number, number in swap.present))

        block.register_forward_pre_hook(note)
    swap.add("dit", network, 3)
    step_of(network, tiny, 0)
    forward = [(0, False), (1, True), (2, True)]
    assert turns == [*forward, (2, False), (1, True), (0, True)]


def test_networks_that_take_turns_have_two_blocks_present_together() -> None:
    """As the experts of a denoiser do, and a network that a loss calls several times."""
    losses = []
    for is_swapped in (False, True):
        networks = [ready(partial(Dit, 8, 3)), ready(partial(Dit, 8, 3))]
        swap = block_swap()
        with poisoned_memory() as seen:
            for number, network in enumerate(networks):
                if is_swapped:
                    swap.add(f"expert {number}", network, 3)
            first, second = networks
            order = (first, second, first)
            loss = torch.stack([tiny(one, 0).square().mean() for one in order]).sum()
            loss.backward()
            swap.release()
            assert seen.most == (2 if is_swapped else 0)
            assert seen.now == 0
        grads = [p.grad for one in networks for p in one.parameters()]
        losses.append([loss.detach(), *(one for one in grads if one is not None)])
    assert all(map(torch.equal, *losses))


def test_forward_passes_without_gradients_leave_nothing_present() -> None:
    network = ready(partial(Dit, 8, 3))
    wanted = tiny(network, 0)
    swap = block_swap()
    swap.add("dit", network, 2)
    with poisoned_memory() as seen, torch.no_grad():
        assert torch.equal(tiny(network, 0), wanted)
    assert (seen.loads, seen.now) == (2, 0)


def test_a_block_that_fails_leaves_nothing_present() -> None:
    network = ready(partial(Dit, 8, 3))
    swap = block_swap()
    swap.add("dit", network, 3)
    with poisoned_memory() as seen:
        with pytest.raises(RuntimeError):
            network(torch.ones(1, 4, 2, 2), torch.ones(1), torch.ones(1, 3, 9), None)
        swap.release()
        assert seen.now == 0


def test_a_unit_may_call_the_network_between_a_forward_and_a_backward_pass() -> None:
    found = []
    for is_swapped in (False, True):
        network = ready(partial(Dit, 8, 3))
        swap = block_swap()
        with poisoned_memory() as seen:
            if is_swapped:
                swap.add("dit", network, 3)
            loss = tiny(network, 0).square().mean()
            with torch.no_grad():
                between = tiny(network, 1)
            loss.backward()
            swap.release()
            assert (seen.now, seen.most) == (0, 2 if is_swapped else 0)
        grads = [one.grad for one in network.parameters() if one.grad is not None]
        found.append([between, *grads])
    assert all(map(torch.equal, *found))


def test_a_backward_pass_that_fails_leaves_the_next_step_right() -> None:
    def fail(grad: Tensor) -> Tensor:
        raise ValueError("in the middle")

    wanted = step_of(ready(partial(Dit, 8, 4)), tiny, 0)
    network = ready(partial(Dit, 8, 4))
    swap = block_swap()
    swap.add("dit", network, 3)
    with poisoned_memory() as seen:
        hook = network.blocks[2].to_q.bias.register_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            tiny(network, 0).square().mean().backward()
        hook.remove()
        network.zero_grad()
        assert same(step_of(network, tiny, 0), wanted)
        swap.release()
        assert seen.now == 0


def test_a_network_whose_blocks_are_not_checkpointed_is_named() -> None:
    network = ready(partial(Dit, 8, 3))
    network.checkpoint = None
    swap = block_swap()
    swap.add("dit", network, 1)
    with pytest.raises(UsageError, match=r"dit\.blocks\.2 \(Block\)"):
        tiny(network, 0)


def test_more_blocks_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match=r"4 .* 3 blocks of dit"):
        block_swap().add("dit", Dit(8, 3), 4)


def test_swapped_weights_can_be_read_in_ram() -> None:
    network = ready(partial(Dit, 8, 3))
    wanted = {name: value.clone() for name, value in network.state_dict().items()}
    swap = block_swap()
    swap.add("dit", network, 2)
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    assert shapes == {name: value.shape for name, value in wanted.items()}
    with swap.readable():
        assert same(network.state_dict(), wanted)
    assert not same(network.state_dict(), wanted)


class Gpu:
    """Streams and events that note what they are asked for; its own stream computes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.copied: list[Copy] = []
        self.copies = False

    def Stream(self, device: torch.device) -> None: ...

    def current_stream(self, device: torch.device) -> "Gpu":
        return self

    def wait_event(self, event: "Event") -> None:
        """Let what is computed from now on wait."""
        self.calls.append(f"wait for {event.after}")

    @contextmanager
    def stream(self, copies: None) -> Iterator[None]:
        """Inside, the stream of copies is the one in use."""
        self.copies = True
        yield
        self.copies = False

    def Event(self) -> "Event":
        return Event(self)

    def load(self, weights: WeightsInRam, name: str) -> "Copy":
        assert self.copies
        self.calls.append(f"copy {name}")
        WeightsInRam.load(weights)
        self.copied.append(Copy(self))
        return self.copied[-1]


@dataclass
class Copy:
    """A copy of a block's weights."""

    gpu: Gpu
    is_recorded: bool = False

    def record_stream(self, stream: Gpu) -> None:
        """Keep its memory until what this stream has been asked for is done."""
        assert stream is self.gpu
        self.is_recorded = True


@dataclass
class Event:
    """The moment after the last call."""

    gpu: Gpu
    after: str = ""

    def record(self, stream: Gpu | None = None) -> None:
        """Take the moment from the stream in use, or from that which computes."""
        assert (stream is None) == self.gpu.copies
        self.after = self.gpu.calls[-1]

    def synchronize(self) -> None:
        self.gpu.calls.append(f"until {self.after}")


def test_on_a_gpu_a_block_waits_for_its_copy_and_a_copy_for_what_was_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of calls alone: no GPU is tested here."""
    gpu = Gpu()
    network = ready(partial(Dit, 8, 3))
    swap = block_swap()
    swap.add("dit", network, 3)
    monkeypatch.setattr("dstrain_memory.block_swap.CUDA", gpu)
    swap._is_cuda = True
    for name, block in network.blocks.named_children():
        one = swap.blocks[int(name)]
        one.weights = SimpleNamespace(
            load=partial(gpu.load, one.weights, name), drop=one.weights.drop
        )
        compute = partial(gpu.calls.append, f"compute {name}")
        block.to_q.register_forward_hook(lambda *_, compute=compute: compute())
    tiny(network, 0).square().mean().backward()
    swap.release()
    assert all(copy.is_recorded for copy in gpu.copied)
    forward = """
        copy 0; copy 1; wait for copy 0; compute 0
        until compute 0; copy 2; wait for copy 1; compute 1
        wait for copy 2; compute 2
    """
    backward = """
        until compute 2; copy 2; until compute 2; copy 1; wait for copy 2; compute 2
        until compute 2; copy 0; wait for copy 1; compute 1
        wait for copy 0; compute 0
    """
    wanted = [one.strip() for one in re.split("[;\n]", forward + backward)]
    assert gpu.calls == list(filter(None, wanted))
