"""Numbers of bitsandbytes and torchao are theirs; what they get wrong is mended."""

import subprocess
import sys

import pytest
import torch
from dstrain.models import METHODS
from dstrain.models.quantization.encodings import from_fp8, from_int8_rows
from dstrain.models.quantization.libraries import (
    _library as import_quietly,
    from_4bit,
    to_4bit,
    to_fp8_rows,
    to_int8_rows,
)

from tests.support.weights_to_store import error, normal, uneven


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(16, 64), (7, 5), (3, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_weights_are_those_of_bitsandbytes(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = normal(0.02, *shape).to(dtype)
    functional = import_quietly("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
    want = functional.dequantize_4bit(packed, state)
    got = from_4bit(kind, shape, to_4bit(kind, weight), dtype)
    assert got.dtype == dtype and torch.equal(got, want)


def test_8_bit_weights_are_those_of_torchao() -> None:
    weight = normal(0.02, 8, 256)
    quantization = import_quietly("torchao.quantization")
    for encode, restore, config in (
        (to_int8_rows, from_int8_rows, quantization.Int8WeightOnlyConfig(version=2)),
        (to_fp8_rows, from_fp8, quantization.Float8WeightOnlyConfig()),
    ):
        layer = torch.nn.Linear(256, 8, bias=False)
        layer.weight.data.copy_(weight)
        quantization.quantize_(layer, config)
        want = layer.weight.dequantize()  # type: ignore[operator]
        assert torch.equal(restore(encode(weight), torch.float32), want)


def test_rows_of_zeros_are_restored_as_zeros() -> None:
    weight = normal(0.02, 4, 64)
    weight[1] = 0
    for encode, restore in ((to_int8_rows, from_int8_rows), (to_fp8_rows, from_fp8)):
        restored = restore(encode(weight), torch.float32)
        assert restored.isfinite().all() and not restored[1].any()


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


@pytest.mark.parametrize(
    "code",
    [
        "import torch; from dstrain.models.quantization.libraries import *\n"
        "weight = torch.ones(2, 64)\n"
        "to_4bit('nf4', weight), to_int8_rows(weight), to_fp8_rows(weight)",
        "from dstrain.config.options.train import TrainConfig\n"
        "from dstrain.training.optimizers.choice import choose_optimizer\n"
        "choose_optimizer(TrainConfig(model='tiny', optimizer='adamw8bit'))",
    ],
    ids=["methods", "optimizer"],
)
def test_importing_the_libraries_prints_nothing(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
