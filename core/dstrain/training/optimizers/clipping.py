"""Clip gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def clip_gradients(parameters: Sequence[nn.Parameter], most: float) -> Tensor:
    """Scale gradients down to a norm of at most this; return their norm before, in fp32.

    Norms of bf16 gradients would be rounded to three digits, each and together.
    """
    if all(one.dtype == torch.float32 for one in parameters):
        clipped: Tensor = nn.utils.clip_grad_norm_(parameters, most)
        return clipped
    gradients = [one.grad for one in parameters if one.grad is not None]
    norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    # As `clip_grad_norm_` does it.
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
