"""Encode weights with bitsandbytes or torchao, which are optional installs.

Only their numbers are used. Their layers are not: those of torchao keep restored weights
from the forward to the backward pass, and those of bitsandbytes have a state that neither
sharding nor moving a layer knows.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dstrain_memory.quantization.encodings import FP8, by_rows

NF4_BLOCK = 64


def to_4bit(kind: str, weight: Tensor) -> tuple[Tensor, ...]:
    """Return (out, in) as pairs of numbers of 4 bits, the scale of each block of 64, and
    the 16 values that the numbers stand for.

    kind: 'nf4' (Dettmers et al. 2023, "QLoRA") or 'fp4'.
    """
    functions = _library("bitsandbytes.functional")

    def encode(rows: Tensor) -> tuple[Tensor, ...]:
        packed, state = functions.quantize_4bit(
            rows.contiguous(), blocksize=NF4_BLOCK, quant_type=kind
        )
        return packed, state.absmax

    code = functions.get_4bit_type(kind, device=weight.device)
    return (*by_rows(encode)(weight), code)


def from_4bit(
    kind: str, shape: tuple[int, int], stored: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """Restore what `to_4bit` returns."""
    functions = _library("bitsandbytes.functional")
    packed, absmax, code = stored
    state = functions.QuantState(
        absmax, torch.Size(shape), code, NF4_BLOCK, kind, dtype
    )
    restored: Tensor = functions.dequantize_4bit(packed.view(torch.uint8), state)
    return restored


def bytes_of_4bit(shape: tuple[int, int]) -> int:
    """Return the bytes of what `to_4bit` returns."""
    count = shape[0] * shape[1]
    return -(-count // 2) + 4 * -(-count // NF4_BLOCK) + 4 * 16


@by_rows
def to_int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, in) as int8 and a scale per row (out, 1), as torchao's
    `Int8WeightOnlyConfig` does.
    """
    stored = _stored_by_torchao(weight, "Int8WeightOnlyConfig", version=2)
    return stored.qdata, stored.scale.float()


@by_rows
def to_fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, in) as the bits of e4m3 numbers, int8, and a scale per row (out, 1),
    as torchao's `Float8WeightOnlyConfig` does.
    """
    stored = _stored_by_torchao(weight, "Float8WeightOnlyConfig")
    scale = stored.scale.float()
    # It divides rows of zeros by zero.
    is_zero = scale == 0
    values = torch.where(is_zero, 0.0, stored.qdata.float()).to(FP8)
    return values.view(torch.int8), torch.where(is_zero, 1.0, scale)


def _stored_by_torchao(weight: Tensor, config: str, **settings: Any) -> Any:
    quantization = _library("torchao.quantization")
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    # In fp32, since torchao computes scales in the dtype of the weight.
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    with _silenced():
        quantization.quantize_(layer, getattr(quantization, config)(**settings))
    return layer.weight


def _library(module: str) -> Any:
    with _silenced():
        return import_module(module)


@contextmanager
def _silenced() -> Iterator[None]:
    """Silence what libraries report on their optional parts."""
    earlier = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(earlier)
