"""bf16 weights take part in updates that are smaller than their last bit."""

import torch
from dstrain.config.options import OptimizerOptions
from dstrain.training.optimizers import build_optimizer, choose_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer

SGD = "torch.optim.SGD"


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 8), (16,), (8, 16))
    numbers = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(one.to(torch.bfloat16)) for one in numbers]


def built(name: str, own: list[nn.Parameter], rate: float) -> Optimizer:
    options = OptimizerOptions(
        optimizer=name, trainable_dtype="bf16", learning_rate=rate, weight_decay=0.0
    )
    named = {f"dit.{number}": one for number, one in enumerate(own)}
    return build_optimizer(choose_optimizer(options), named)


def stepped(numbers: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """bf16 numbers after a step, in fp32."""
    own = nn.Parameter(numbers.to(torch.bfloat16).contiguous())
    optimizer = built(SGD, [own], rate)
    own.grad = gradient.to(torch.bfloat16)
    torch.manual_seed(0)
    optimizer.step()
    return own.detach().float()


def test_the_mean_of_many_roundings_is_the_number_between_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    start, gradient = torch.randn(2, 100, generator=generator).to(torch.bfloat16)
    exact = start.float() - 1e-3 * gradient.float()
    # The two bf16 numbers around each.
    low = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
    high = ((exact.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    found = stepped(start.expand(10_000, 100), gradient.expand(10_000, 100), 1e-3)
    assert bool(((found == low) | (found == high)).all())
    ulp = (high - low).abs().double()
    error = (found.double().mean(0) - exact.double()) / ulp
    assert abs(error.mean()) < 2e-3
    assert error.abs().max() < 0.03  # six times what is expected of one number


def test_parameters_are_never_of_another_dtype_and_stand_ins_take_no_memory() -> None:
    """Autograd forgets who waits for the gradient of one that was: DDP would."""
    own = parameters()
    noticed = []
    for one in own:
        one.register_post_accumulate_grad_hook(lambda _: noticed.append(1))
        one.grad = torch.ones_like(one)
    node = own[0].view_as(own[0]).grad_fn
    assert node is not None
    accumulator = node.next_functions[0][0]
    optimizer = built("adamw", own, 0.5)
    optimizer.step()
    own[0].float().sum().backward()
    assert noticed == [1]
    again = own[0].view_as(own[0]).grad_fn
    assert again is not None and again.next_functions[0][0] is accumulator
    stand_ins = [one for group in optimizer.param_groups for one in group["params"]]
    assert [one.shape for one in stand_ins] == [one.shape for one in own]
    assert all(one.untyped_storage().nbytes() == 4 for one in stand_ins)
