"""Encode weights as numbers of 8 bits with scales, and restore them.

Restored values are rounded once: products of the numbers and scales are computed in
fp32, then written in the dtype asked for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
INT8_MAX = 127
BLOCK = 128
"""Weights of a row that share a scale in `int8_block`."""
LEAST = torch.finfo(torch.float32).tiny
"""The least scale, so that rows of zeros are restored as zeros."""


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, in) as the bits of e4m3 numbers, int8, and a scale per row (out, 1)."""
    exact = weight.float()
    scale = (exact.abs().amax(1, keepdim=True) / FP8_MAX).clamp_min(LEAST)
    return (exact / scale).to(FP8).view(torch.int8), scale


def from_fp8(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Restore what `to_fp8` returns."""
    packed, scale = stored
    # bf16 and fp32 contain every e4m3 number.
    return scaled(packed.view(FP8).to(dtype), scale, dtype)


def fp8_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of what `to_fp8` returns."""
    rows, columns = shape
    return rows * columns + 4 * rows


def to_int8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, in) as int8, and a scale per block of 128 weights of a row
    (out, blocks, 1); the last block may be shorter.
    """
    rows, columns = weight.shape
    blocks = _in_blocks(weight.float())
    scale = (blocks.abs().amax(2, keepdim=True) / INT8_MAX).clamp_min(LEAST)
    whole = (blocks / scale).round().to(torch.int8)
    return whole.reshape(rows, -1)[:, :columns].contiguous(), scale


def from_int8_block(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Restore what `to_int8_block` returns."""
    packed, scale = stored
    rows, columns = packed.shape
    restored = scaled(_in_blocks(packed), scale, dtype).reshape(rows, -1)
    return restored[:, :columns].contiguous()


def int8_block_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of what `to_int8_block` returns."""
    rows, columns = shape
    return rows * columns + 4 * rows * -(-columns // BLOCK)


def from_int8_rows(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Restore int8 (out, in) with a scale per row (out, 1)."""
    packed, scale = stored
    return scaled(packed, scale, dtype)


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values x scale, computed in fp32 and rounded once, without a copy in fp32."""
    restored = torch.empty(values.shape, dtype=dtype, device=values.device)
    return torch.mul(values, scale, out=restored)


def _in_blocks(values: Tensor) -> Tensor:
    """Return (out, in) as (out, blocks, 128), the last block filled up with zeros."""
    rows, columns = values.shape
    missing = -columns % BLOCK
    if missing:
        values = functional.pad(values, (0, missing))
    return values.reshape(rows, -1, BLOCK)
