"""The benchmarks for a GPU run at toy sizes on a CPU, so that a sitting with a GPU is not
spent on their errors.
"""

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from benchmarks.gpu import calls
from benchmarks.gpu.calls import CALLS, lines
from benchmarks.gpu.cards import MODELS, PAGE, TABLE, plan, row


@pytest.fixture(scope="module")
def measured_once() -> Iterator[None]:
    """At toy size many cases are one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "measure", cache(calls.measure))
        yield


@pytest.mark.usefixtures("measured_once")
@pytest.mark.parametrize("number", sorted(CALLS))
def test_a_call_runs_at_toy_size(number: int) -> None:
    about, *cases = lines(number, torch.device("cpu"), tiny=True)
    assert about["call"] == number
    assert len(cases) == len(CALLS[number])
    for one in cases:
        assert "failed" not in one, one
        assert all(math.isfinite(loss) for loss in one["losses"])
        assert one["trained"] > 0 and one["step_s"] > 0


def test_methods_and_places_of_weights_are_what_is_measured() -> None:
    """At least one case stores, swaps, offloads, compiles and trains in full."""
    every = [case for cases in CALLS.values() for case in cases]
    assert {case.method for case in every} >= {"", "fp8", "bitsandbytes_nf4"}
    assert {case.checkpointing for case in every} == {"none", "block", "offload"}
    assert any(case.swap for case in every) and any(case.compile for case in every)
    assert {case.train for case in every} == {"lora", "full"}
    assert {case.model for case in every} == {"qwen_image", "flux", "wan"}


@pytest.mark.slow
def test_the_page_of_cards_says_what_is_computed_now() -> None:
    """Of one family, and the smallest card: `python -m benchmarks.gpu.cards check`
    compares all rows.
    """
    model = "FLUX.1 dev, 1024 x 1024"
    page = PAGE.read_text().splitlines()
    assert TABLE.splitlines()[0] in page
    assert row(model, plan(MODELS[model]), "12GB") in page
