"""Weights in 8 and 4 bits are restored within the errors that the guide states; numbers of
bitsandbytes and torchao are theirs, and what they get wrong is mended.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from dstrain_memory.quantization.known_methods import METHODS
from dstrain_memory.quantization.linear import QuantizedLinear
from dstrain_memory.quantization.method import QuantizationMethod
from torch import Tensor, nn

FP8, BLOCKS = METHODS["fp8"], METHODS["int8_block"]


def normal(deviation: float, rows: int = 256, columns: int = 1024) -> Tensor:
    """Normally distributed weights (rows, columns)."""
    draws = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=draws) * deviation


def uneven() -> Tensor:
    """Rows of different scale, with outliers."""
    draws = torch.Generator().manual_seed(1)
    weight = normal(0.02) * torch.exp(torch.randn(256, 1, generator=draws) * 0.5)
    is_outlier = torch.rand(weight.shape, generator=draws) < 1e-4
    return torch.where(is_outlier, weight * 20, weight)


def stored(method: QuantizationMethod, weight: Tensor) -> QuantizedLinear:
    """A layer with this weight, stored by a method."""
    rows, columns = weight.shape
    layer = method.store(nn.Linear(columns, rows, bias=False, device="meta"), weight)
    assert isinstance(layer, QuantizedLinear)
    return layer


def error(method: QuantizationMethod, weight: Tensor) -> float:
    """The relative error of what a method restores."""
    return float((stored(method, weight).restored() - weight).norm() / weight.norm())


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """On a CPU, bitsandbytes compiles what it computes, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(
    ("name", "bound", "for_uneven"),
    [("fp8", 0.027, 0.027), ("int8_block", 0.0067, 0.008)],
)
def test_the_error_does_not_depend_on_how_small_weights_are(
    name: str, bound: float, for_uneven: float
) -> None:
    for deviation in (0.02, 0.005, 1e-6):
        assert bound * 0.95 < error(METHODS[name], normal(deviation)) < bound
    assert for_uneven * 0.9 < error(METHODS[name], uneven()) < for_uneven


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("bitsandbytes_nf4", 0.097),
        ("bitsandbytes_fp4", 0.13),
        ("torchao_int8_w8a16", 0.024),
        ("torchao_fp8_w8a16", 0.027),
    ],
)
def test_errors_are_within_those_that_the_guide_states(name: str, bound: float) -> None:
    for weight in (normal(0.02), normal(0.005), uneven()):
        assert bound / 4 < error(METHODS[name], weight) < bound


def test_int8_in_blocks_is_three_times_as_exact_as_fp8_at_equal_size() -> None:
    weight = normal(0.02)
    assert error(FP8, weight) > 3.9 * error(BLOCKS, weight)
    shape = (3072, 3072)
    assert BLOCKS.stored_bytes(shape) < 1.04 * FP8.stored_bytes(shape)


@pytest.mark.parametrize("columns", [1, 127, 128, 130, 384])
def test_blocks_may_end_within_a_row(columns: int) -> None:
    weight = normal(0.02, 3, columns)
    layer = stored(BLOCKS, weight)
    packed, scale = layer.stored
    assert packed.shape == (3, columns) and packed.is_contiguous()
    assert scale.shape == (3, -(-columns // 128), 1)
    assert (layer.restored() - weight).abs().max() <= scale.max() / 2 * 1.001
    last = weight[:, -(columns % 128 or 128) :].abs().amax(1) / 127
    assert torch.allclose(scale[:, -1, 0], last)


@pytest.mark.parametrize("name", [one for one in METHODS if "bitsandbytes" not in one])
def test_the_largest_weights_of_a_row_are_exact_and_zeros_stay_zeros(name: str) -> None:
    weight = normal(0.02, 4, 256)
    weight[2] = 0
    restored = stored(METHODS[name], weight).restored()
    assert restored.isfinite().all() and torch.equal(restored[2], weight[2])
    rows, greatest = torch.arange(4), weight.abs().argmax(1)
    exact, found = weight[rows, greatest], restored[rows, greatest]
    # torchao's numbers of 8 bits reach from -128 to 127.
    assert torch.allclose(found, exact, rtol=0.01 if name.startswith("torc") else 1e-6)


def test_a_weight_that_is_no_number_is_seen_in_the_scales() -> None:
    weight = normal(0.02, 2, 8)
    weight[1, 3] = torch.nan
    for one in (FP8, BLOCKS):
        _, scale = stored(one, weight).stored
        assert scale[0].isfinite().all() and scale[1].isnan().all()


def test_products_are_rounded_once() -> None:
    layer = stored(METHODS["torchao_int8_w8a16"], normal(0.02, 4, 256).bfloat16())
    packed, scale = layer.stored
    want = (packed.double() * scale.double()).float().bfloat16()
    assert torch.equal(layer.restored(), want)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("columns", [1 << 15, 5])
def test_a_weight_encoded_in_parts_is_what_they_are_encoded_as_alone(
    name: str, columns: int
) -> None:
    """Of so many columns, 64 rows at once."""
    weight = normal(0.02, 66, columns).bfloat16()
    whole = stored(METHODS[name], weight).stored
    alone = [stored(METHODS[name], part).stored for part in weight.split(64)]
    for found, *parts in zip(whole, *alone, strict=True):
        is_shared = torch.equal(found, parts[0])
        assert is_shared or torch.equal(found, torch.cat(parts))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(16, 64), (7, 5), (3, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_weights_are_those_of_bitsandbytes(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = normal(0.02, *shape).to(dtype)
    got = stored(METHODS[f"bitsandbytes_{kind}"], weight).restored()
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
    want = functional.dequantize_4bit(packed, state)
    assert got.dtype == dtype and torch.equal(got, want)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bit_weights_are_those_of_torchao(kind: str) -> None:
    weight = normal(0.02, 8, 256)
    got = stored(METHODS[f"torchao_{kind}_w8a16"], weight).restored()
    from torchao import quantization

    config = quantization.Float8WeightOnlyConfig()
    if kind == "int8":
        config = quantization.Int8WeightOnlyConfig(version=2)
    layer = torch.nn.Linear(256, 8, bias=False)
    layer.weight.data.copy_(weight)
    quantization.quantize_(layer, config)
    assert torch.equal(got, layer.weight.dequantize())  # type: ignore[operator]  # of torchao


METHOD_BY_METHOD = """
import torch
from dstrain_memory.quantization.known_methods import METHODS

layer = torch.nn.Linear(64, 2)
for method in METHODS.values():
    method.store(layer, layer.weight.detach())
"""
OPTIMIZER = """
from dstrain import TrainConfig
from dstrain.training.optimizers import choose_optimizer

choose_optimizer(TrainConfig(model="tiny", optimizer="adamw8bit"))
"""


@pytest.mark.parametrize(
    "code", [METHOD_BY_METHOD, OPTIMIZER], ids=["methods", "optimizer"]
)
def test_importing_the_libraries_prints_nothing(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
