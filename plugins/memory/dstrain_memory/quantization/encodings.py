"""Encode weights as numbers of 8 bits with scales, and restore them.

Restored values are rounded once: products of the numbers and scales are computed in
fp32, then written in the dtype asked for.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain

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
AT_ONCE = 1 << 20
"""About how many numbers of a weight are encoded at once."""
ALIGNMENT = 64
"""Rows encoded at once are a multiple of it, so that blocks of 64 numbers, which
continue from row to row, never continue from one part to the next."""

Encode = Callable[[Tensor], Sequence[Tensor]]
"""(weight (out, in)) -> what is stored of it."""


def by_rows(encode: Encode) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Let a function encode some rows of a weight after others, and join what it returns
    along the first dimension.

    What encoding computes in fp32 is several times as large as the weight; of a part it is
    small, and the allocator uses the same memory for every part.
    """

    @wraps(encode)
    def encode_parts(weight: Tensor) -> tuple[Tensor, ...]:
        rows = max(1, AT_ONCE // weight.shape[1] // ALIGNMENT) * ALIGNMENT
        first, *others = torch.split(weight, rows)
        encoded = encode(first)
        whole = tuple(_enlarged(one, len(weight), len(first)) for one in encoded)
        # Filled part by part, not joined at the end: between parts that are kept, the
        # allocator would keep what was freed.
        sizes = map(len, encoded)
        places = zip(*map(torch.split, whole, sizes), strict=True)
        for place, part in zip(
            places, chain([encoded], map(encode, others)), strict=True
        ):
            for target, one in zip(place, part, strict=True):
                target.copy_(one)
        return whole

    return encode_parts


@by_rows
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


@by_rows
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


def _enlarged(encoded: Tensor, rows: int, of: int) -> Tensor:
    """Return an empty tensor for as many rows of a weight, given what `of` rows became."""
    return encoded.new_empty(-(-len(encoded) * rows // of), *encoded.shape[1:])


def _in_blocks(values: Tensor) -> Tensor:
    """Return (out, in) as (out, blocks, 128), the last block filled up with zeros."""
    rows, columns = values.shape
    missing = -columns % BLOCK
    if missing:
        values = functional.pad(values, (0, missing))
    return values.reshape(rows, -1, BLOCK)
