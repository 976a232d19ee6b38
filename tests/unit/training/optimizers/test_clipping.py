"""Gradients are clipped as torch does it; the norm of bf16 ones is that of fp32."""

import torch
from dstrain.training.optimizers import clip_gradients
from torch import nn


def with_gradients(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(3)]
    for parameter in parameters[:2]:
        gradient = torch.randn(300, generator=generator)
        parameter.grad = gradient.to(dtype)
    return parameters


def test_fp32_is_as_in_torch() -> None:
    ours, theirs = with_gradients(torch.float32), with_gradients(torch.float32)
    norm = clip_gradients(ours, 1.0)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 1.0))
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert ours[2].grad is None


def test_the_norm_of_bf16_gradients_has_more_than_three_digits() -> None:
    parameters = with_gradients(torch.bfloat16)
    gradients = [one.grad.double() for one in parameters[:2] if one.grad is not None]
    exact = torch.linalg.vector_norm(torch.cat(gradients))
    norm = clip_gradients(parameters, 1.0)
    assert norm.dtype == torch.float32
    assert abs(norm.double() / exact - 1) < 1e-6
    first = parameters[0].grad
    assert first is not None and first.dtype == torch.bfloat16
    assert torch.allclose(first.double(), gradients[0] / exact, rtol=2**-7)
    again = clip_gradients(parameters, 10.0)
    assert abs(float(again) - 1) < 1e-2
    assert torch.equal(first, parameters[0].grad)  # type: ignore[arg-type]
