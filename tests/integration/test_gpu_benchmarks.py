"""The benchmarks for a GPU run at toy sizes on a CPU, so that a sitting with a GPU is not
spent on their errors.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from dstrain_memory import compilation

from benchmarks.gpu import calls
from benchmarks.gpu.calls import CALLS, QWEN, lines, toy
from benchmarks.gpu.cards import MODELS, PAGE, TABLE, plan, row
from benchmarks.gpu.step import measure
from tests.support import everyday


@pytest.fixture(scope="module")
def measured_once() -> Iterator[None]:
    """At toy size many cases are one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "measure", cache(calls.measure))
        yield


@pytest.mark.usefixtures("measured_once")
@pytest.mark.parametrize("number", everyday.cases(sorted(CALLS), lambda one: one != 5))
def test_a_call_runs_at_toy_size(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks are traced as for a GPU; only code is not generated, which takes long.
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    about, *cases = lines(number, torch.device("cpu"), tiny=True)
    assert about["call"] == number
    assert len(cases) == len(CALLS[number])
    for one in cases:
        assert "failed" not in one, one
        assert all(math.isfinite(loss) for loss in one["losses"])
        assert one["trained"] > 0 and one["step_s"] > 0
        assert one["tokens_per_s"] > 0 and one["tflops"] > 0
    if {case.program for case in CALLS[number]} & {"diffusers", "reference"}:
        check_pairs(cases)


def check_pairs(cases: list[dict[str, Any]]) -> None:
    """Comparisons are of the same network, stored alike, and of the same targets."""
    for ours, theirs in zip(cases[::2], cases[1::2], strict=True):
        assert ours["case"]["program"] == "dstrain" != theirs["case"]["program"]
        for same in ("method", "swap", "rank", "batch"):
            assert ours["case"][same] == theirs["case"][same]
        assert ours["parameters"] == theirs["parameters"]
        # dstrain leaves out layers that no loss reaches.
        assert ours["trained"] <= theirs["trained"] < 1.1 * ours["trained"]


def test_a_layer_in_ram_computes_what_it_computes_on_the_device() -> None:
    losses = []
    for swap in (0, -1):
        case = toy(replace(QWEN, program="reference", swap=swap))
        case = replace(case, steps=3)
        losses.append(measure(case, torch.device("cpu"), tiny=True).losses)
    assert losses[0] == losses[1]


def test_no_case_begins_when_the_time_is_over() -> None:
    _, *cases = lines(7, torch.device("cpu"), tiny=True, seconds=0)
    assert all(case["left_out"] == "0 seconds are over" for case in cases)


@pytest.mark.drawn  # it counts the memory of a model at its published size
def test_the_page_of_cards_says_what_is_computed_now() -> None:
    """Of one family, and the smallest card: `python -m benchmarks.gpu.cards check`
    compares all rows.
    """
    model = "FLUX.1 dev, 1024 x 1024"
    page = PAGE.read_text().splitlines()
    assert TABLE.splitlines()[0] in page
    assert row(model, plan(MODELS[model]), "12GB") in page
