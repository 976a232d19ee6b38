"""bf16 weights take part in updates that are smaller than their last bit."""

import pytest
import torch
from dstrain import UsageError
from dstrain.config.options import OptimizerOptions
from dstrain.runs.checkpoints.state import TrainingState, load_state, save_state
from dstrain.training.optimizers import OPTIMIZERS, build_optimizer, choose_optimizer
from dstrain.training.optimizers.rounding import (
    StochasticRounding,
    round_stochastically,
)
from torch import Tensor, nn

from tests.support.runs import same

REFUSED = ("prodigy", "schedulefree")
ALLOWED = [name for name in OPTIMIZERS if name not in REFUSED]


def test_the_mean_of_many_roundings_is_the_number() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator)
    # The distance between the two bf16 numbers around each.
    low = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    high = ((values.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    ulp = (high - low).abs().double()
    total = torch.zeros(1000, dtype=torch.float64)
    for _ in range(10_000):
        total += round_stochastically(values).double()
    error = (total / 10_000 - values.double()) / ulp
    assert abs(error.mean()) < 1e-3
    assert error.abs().max() < 0.03  # six times what is expected of one number


def test_only_neighbours_are_chosen_and_bf16_numbers_stay() -> None:
    torch.manual_seed(0)
    values = torch.tensor([1.001, -1.001, 0.0, -0.0, 1.0, -3.5, torch.inf, torch.nan])
    found = torch.stack([round_stochastically(values) for _ in range(2000)]).float()
    assert set(found[:, 0].tolist()) == {1.0, 1.0078125}
    assert set(found[:, 1].tolist()) == {-1.0, -1.0078125}
    for column in range(2, 7):
        assert set(found[:, column].tolist()) == {values[column].item()}
    assert bool(found[:, 7].isnan().all())


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 8), (16,), (8, 16))
    numbers = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(one.to(torch.bfloat16)) for one in numbers]


def built(
    name: str, own: list[nn.Parameter], *arguments: str, **flags: float
) -> torch.optim.Optimizer:
    options = OptimizerOptions(
        optimizer=name,
        optimizer_args=arguments,
        trainable_dtype="bf16",
        **flags,  # type: ignore[arg-type]
    )
    named = {f"dit.{number}": one for number, one in enumerate(own)}
    return build_optimizer(choose_optimizer(options), named)


def step(own: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in own:
        one.grad = torch.randn(one.shape, generator=generator).to(torch.bfloat16) + 1
    torch.manual_seed(seed)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ALLOWED)
def test_steps_resume_bit_for_bit_with_a_state_in_fp32(
    name: str, tmp_path: object
) -> None:
    arguments = ("min_8bit_size=1",) if "8bit" in name else ()
    own = parameters()
    optimizer = built(name, own, *arguments)
    for seed in range(12):
        step(own, optimizer, seed)
    assert all(one.dtype == torch.bfloat16 for one in own)
    folder = tmp_path / "state"  # type: ignore[operator]
    weights = {str(i): one.detach() for i, one in enumerate(own)}
    save_state(folder, TrainingState(12, weights, optimizer.state_dict(), {}, "", {}))
    saved = load_state(folder)
    other = parameters()
    for number, parameter in enumerate(other):
        parameter.data.copy_(saved.trainable[str(number)])
    resumed = built(name, other, *arguments)
    resumed.load_state_dict(saved.optimizer)
    assert same(optimizer.state_dict(), resumed.state_dict())
    for seed in range(12, 24):
        step(own, optimizer, seed)
        step(other, resumed, seed)
    assert same(own, other)
    kept = [v for s in resumed.state.values() for v in s.values()]
    dtypes = {one.dtype for one in kept if isinstance(one, Tensor)}
    assert torch.bfloat16 not in dtypes


def test_small_updates_move_weights_on_average_by_what_they_are() -> None:
    own = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))]
    optimizer = built("torch.optim.SGD", own, learning_rate=1e-5, weight_decay=0.0)
    assert isinstance(optimizer, StochasticRounding)
    nearest = own[0].detach().clone()
    for seed in range(100):
        own[0].grad = torch.ones_like(own[0])
        nearest -= 1e-5
        torch.manual_seed(seed)
        optimizer.step()
    assert torch.equal(nearest, torch.ones_like(nearest))
    moved = 1 - own[0].float().mean().item()
    assert moved == pytest.approx(1e-3, rel=0.1)


def test_it_equals_the_optimizer_in_fp32_but_for_the_rounding() -> None:
    own = parameters()
    exact = [nn.Parameter(one.detach().float()) for one in own]
    optimizer, other = (
        built("adamw", own, learning_rate=0.5),
        torch.optim.AdamW(exact, 0.5, weight_decay=0.01),
    )
    for one, number in zip(own, exact, strict=True):
        number.grad = torch.ones_like(number)
        one.grad = torch.ones_like(one)
    optimizer.step()
    other.step()
    for one, number in zip(own, exact, strict=True):
        assert torch.allclose(one.float(), number, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_parameters_at_once_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as found:
        built(name, parameters())
    assert found.value.where == "--trainable_dtype"
    assert "adamw8bit" in str(found.value)


def test_parameters_without_a_gradient_stay() -> None:
    own = parameters()
    before = own[1].detach().clone()
    optimizer = built("adamw", own, learning_rate=0.5)
    own[0].grad = torch.ones_like(own[0])
    optimizer.step()
    assert torch.equal(own[1], before) and len(optimizer.state) == 1


def test_parameters_are_never_of_another_dtype_and_stand_ins_take_no_memory() -> None:
    """Autograd forgets who waits for the gradient of one that was: DDP would."""
    own = parameters()
    noticed = []
    for one in own:
        one.register_post_accumulate_grad_hook(lambda _: noticed.append(1))
    node = own[0].view_as(own[0]).grad_fn
    assert node is not None
    accumulator = node.next_functions[0][0]
    optimizer = built("adamw", own, learning_rate=0.5)
    step(own, optimizer, 0)
    (own[0].float().sum()).backward()
    assert noticed == [1]
    again = own[0].view_as(own[0]).grad_fn
    assert again is not None and again.next_functions[0][0] is accumulator
    stand_ins = [one for group in optimizer.param_groups for one in group["params"]]
    assert [one.shape for one in stand_ins] == [one.shape for one in own]
    assert all(one.untyped_storage().nbytes() == 4 for one in stand_ins)
