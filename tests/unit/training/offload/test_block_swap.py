"""Block swap changes no bit of losses and gradients, under poisoned memory, and holds no
more than two blocks on the device.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
)
from dstrain.errors import UsageError
from dstrain.models.execution.gradient_checkpointing import enable_checkpointing
from dstrain.training.offload.block_swap import BlockSwap
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from tests.support.family import Dit
from tests.support.poisoned_memory import poisoned_memory

CPU = torch.device("cpu")
Call = Callable[[nn.Module, int], Tensor]


def drawn(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def tiny(network: nn.Module, step: int) -> Tensor:
    mask = torch.ones(1, 3, dtype=torch.bool)
    return network(drawn(step, 1, 4, 2, 2), torch.ones(1), drawn(step, 1, 3, 8), mask)


def qwen(network: nn.Module, step: int) -> Tensor:
    return network(
        hidden_states=drawn(step, 1, 16, 64),
        encoder_hidden_states=drawn(step, 1, 7, 32),
        encoder_hidden_states_mask=None,
        timestep=torch.full((1,), 0.5),
        img_shapes=[[(1, 4, 4)]],
        return_dict=False,
    )[0]


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


def wan(network: nn.Module, step: int) -> Tensor:
    return network(
        hidden_states=drawn(step, 1, 16, 2, 4, 4),
        timestep=torch.full((1,), 500.0),
        encoder_hidden_states=drawn(step, 1, 7, 32),
        return_dict=False,
    )[0]


QWEN = partial(
    QwenImageTransformer2DModel,
    patch_size=2,
    in_channels=64,
    out_channels=16,
    num_layers=4,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    axes_dims_rope=(4, 6, 6),
)
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
WAN = partial(
    WanTransformer3DModel,
    num_attention_heads=2,
    attention_head_dim=16,
    text_dim=32,
    freq_dim=16,
    ffn_dim=32,
    num_layers=4,
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


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Call, int]] = {
    "tiny": (partial(Dit, 8, 4), tiny, 4),
    "qwen_image": (QWEN, qwen, 4),
    "flux": (FLUX, flux, 5),
    "wan": (WAN, wan, 4),
    "an encoder of transformers": (partial(CLIPTextModel, CLIP), clip, 4),
}
"""Name -> its network, a call of it, the number of its blocks."""


def ready(build: Callable[[], nn.Module], offload: bool = False) -> nn.Module:
    """A network whose biases are trained; two calls give the same."""
    torch.manual_seed(0)
    network = build().train()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
        if name.endswith("scale_shift_table"):
            continue
        with torch.no_grad():
            parameter.copy_(drawn(len(name), *parameter.shape) * 0.2)
    enable_checkpointing("dit", network, offload)
    return network


def step_of(network: nn.Module, call: Call, step: int) -> dict[str, Tensor]:
    """Make a step; returns its loss and gradients."""
    loss = call(network, step).square().mean()
    loss.backward()
    numbers = {"loss": loss.detach()}
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            numbers[name] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return numbers


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
        swap = BlockSwap(CPU)
        swap.add("dit", swapped, count)
        for step in range(3):
            wanted = step_of(plain, call, step)
            assert len(wanted) > blocks
            assert same(step_of(swapped, call, step), wanted)
            swap.release()
            assert seen.now == 0
            assert seen.loads == (step + 1) * 2 * count
        assert seen.most <= 2


@pytest.mark.parametrize("name", ["tiny", "qwen_image", "flux", "wan"])
def test_weights_that_are_dropped_too_early_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above do not pass by reading memory that was given back."""
    build, call, blocks = NETWORKS[name]
    wanted = step_of(ready(build), call, 0)
    before = BlockSwap._before

    def too_early(self: BlockSwap, number: int, module: nn.Module) -> None:
        before(self, number, module)
        # After its recomputation, in place of after its gradients.
        module.register_forward_hook(lambda *_: self._drop(number), always_call=True)

    monkeypatch.setattr(BlockSwap, "_before", too_early)
    swapped = ready(build)
    swap = BlockSwap(CPU)
    swap.add("dit", swapped, blocks)
    with poisoned_memory():
        assert not same(step_of(swapped, call, 0), wanted)


def test_networks_that_take_turns_have_two_blocks_present_together() -> None:
    """As the experts of a denoiser do, and a network that a loss calls several times."""
    losses = []
    for is_swapped in (False, True):
        networks = [ready(partial(Dit, 8, 3)), ready(partial(Dit, 8, 3))]
        swap = BlockSwap(CPU)
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
    swap = BlockSwap(CPU)
    swap.add("dit", network, 2)
    with poisoned_memory() as seen, torch.no_grad():
        assert torch.equal(tiny(network, 0), wanted)
    assert (seen.loads, seen.now) == (2, 0)


def test_a_block_that_fails_leaves_nothing_present() -> None:
    network = ready(partial(Dit, 8, 3))
    swap = BlockSwap(CPU)
    swap.add("dit", network, 3)
    with poisoned_memory() as seen:
        with pytest.raises(RuntimeError):
            network(torch.ones(1, 4, 2, 2), torch.ones(1), torch.ones(1, 3, 9), None)
        swap.release()
        assert seen.now == 0


def test_a_network_whose_blocks_are_not_checkpointed_is_named() -> None:
    network = ready(partial(Dit, 8, 3))
    network.checkpoint = None
    swap = BlockSwap(CPU)
    swap.add("dit", network, 1)
    with pytest.raises(UsageError) as caught:
        tiny(network, 0)
    assert "dit.blocks.2 (Block) is called without gradient" in str(caught.value)


def test_more_blocks_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        BlockSwap(CPU).add("dit", Dit(8, 3), 4)
    assert "4 is more than the 3 blocks of dit" in str(caught.value)


def test_swapped_weights_can_be_read_in_ram() -> None:
    network = ready(partial(Dit, 8, 3))
    wanted = {name: value.clone() for name, value in network.state_dict().items()}
    swap = BlockSwap(CPU)
    swap.add("dit", network, 2)
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    assert shapes == {name: value.shape for name, value in wanted.items()}
    with swap.readable():
        assert same(network.state_dict(), wanted)
    assert not same(network.state_dict(), wanted)
