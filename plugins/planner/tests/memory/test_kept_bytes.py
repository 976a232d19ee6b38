"""A plan says how components are kept, and the bytes that they then take."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain.runs import plan_of
from dstrain_memory.quantization.known_methods import METHODS

from tests.support.family import IDS
from tests.support.runs import config

pytestmark = pytest.mark.usefixtures("tiny")


def kept(folder: Path, **flags: Any) -> dict[str, str]:
    return dict(plan_of(config(folder, dry_run=True, **flags))[1])


def kib_in(words: str) -> list[float]:
    return [float(size) for size in re.findall(r"([\d.]+) KiB", words)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("precision", "dtype"), [("no", "fp32"), ("bf16", "bf16")])
def test_bytes_are_those_that_a_dry_run_counts(
    method: str, precision: str, dtype: str, here: Path, dry_run: Callable[..., Any]
) -> None:
    options = f"dit:{method};text_encoder:{method}"
    flags = {"quant_options": options, "mixed_precision": precision}
    memory = dry_run(here, **flags).memory
    for name, words in kept(here, **flags).items():
        assert words.startswith(f"{method}: ")
        assert words.endswith(f" KiB on the device, loaded as {dtype}")
        assert kib_in(words) == [memory[name] / 2**10]


def test_the_place_of_weights_is_said_with_their_bytes(
    here: Path, dry_run: Callable[..., Any]
) -> None:
    flags = {"blocks_to_swap": 1, "offload_models": "text_encoder"}
    found = kept(here, mixed_precision="no", **flags)
    memory = dry_run(here, **flags).memory
    assert "1 block " in found["dit"]
    on_device, in_ram = kib_in(found["dit"])
    (encoder,) = kib_in(found["text_encoder"])
    assert on_device == memory["dit"] / 2**10
    assert in_ram + encoder == pytest.approx(memory["RAM for weights"] / 2**10, abs=0.2)
    assert "in RAM" in found["text_encoder"]


def test_without_model_files_the_first_published_ones_are_measured(here: Path) -> None:
    given: dict[str, Any] = {"model_paths": None, "quant_options": "dit:fp8"}
    found = kept(here, **given, fp8_models="text_encoder")
    assert found["dit"].endswith(f" {IDS.partition(':')[0]}")
    # Nothing is published of it.
    assert found["text_encoder"] == "fp8"
    for named in ({"model_id_with_origin_paths": IDS}, {"toy": True}):
        words = kept(here, **given, **named)["dit"]
        assert words.endswith(", loaded as fp32")
        assert kib_in(words) == kib_in(found["dit"]) != []
