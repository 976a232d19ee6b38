"""Weights in 8 bits are restored within the errors that the guide states."""

import pytest
import torch
from dstrain.models.quantization.encodings import (
    from_fp8,
    from_int8_block,
    scaled,
    to_fp8,
    to_int8_block,
)
from dstrain.models.quantization.methods import FP8, INT8_BLOCK
from dstrain.plugin import QuantizationMethod

from tests.support.weights_to_store import error, normal, uneven


@pytest.mark.parametrize(
    ("method", "bound", "for_uneven"),
    [(FP8, 0.027, 0.027), (INT8_BLOCK, 0.0067, 0.008)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_error_does_not_depend_on_how_small_weights_are(
    method: QuantizationMethod, bound: float, for_uneven: float
) -> None:
    for deviation in (0.02, 0.005, 1e-6):
        assert bound * 0.95 < error(method, normal(deviation)) < bound
    assert for_uneven * 0.9 < error(method, uneven()) < for_uneven


def test_int8_in_blocks_is_three_times_as_exact_as_fp8_at_equal_size() -> None:
    weight = normal(0.02)
    assert error(FP8, weight) > 3.9 * error(INT8_BLOCK, weight)
    shape = (3072, 3072)
    assert INT8_BLOCK.stored_bytes(shape) < 1.04 * FP8.stored_bytes(shape)


@pytest.mark.parametrize("columns", [1, 127, 128, 130, 384])
def test_blocks_may_end_within_a_row(columns: int) -> None:
    weight = normal(0.02, 3, columns)
    packed, scale = to_int8_block(weight)
    assert packed.shape == (3, columns) and packed.is_contiguous()
    assert scale.shape == (3, -(-columns // 128), 1)
    restored = from_int8_block((packed, scale), torch.float32)
    assert (restored - weight).abs().max() <= scale.max() / 2 * 1.001
    last = weight[:, -(columns % 128 or 128) :].abs().amax(1) / 127
    assert torch.allclose(scale[:, -1, 0], last)


def test_the_largest_weights_of_a_row_are_exact_and_zeros_stay_zeros() -> None:
    weight = normal(0.02, 4, 256)
    weight[2] = 0
    for stored, restore in (
        (to_fp8(weight), from_fp8),
        (to_int8_block(weight), from_int8_block),
    ):
        restored = restore(stored, torch.float32)
        assert torch.equal(restored[2], weight[2])
        greatest = weight.abs().argmax(1)
        rows = torch.arange(4)
        exact, found = weight[rows, greatest], restored[rows, greatest]
        assert torch.allclose(found, exact, rtol=1e-6)


def test_a_weight_that_is_no_number_is_seen_in_the_scales() -> None:
    weight = normal(0.02, 2, 8)
    weight[1, 3] = torch.nan
    for stored in (to_fp8(weight), to_int8_block(weight)):
        assert stored[1][0].isfinite().all() and stored[1][1].isnan().all()


def test_products_are_rounded_once() -> None:
    values = torch.arange(-127, 128, dtype=torch.int8)[None]
    scale = torch.tensor([[0.001234567]])
    want = (values.double() * scale.double()).float().bfloat16()
    assert torch.equal(scaled(values, scale, torch.bfloat16), want)
