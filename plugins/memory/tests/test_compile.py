"""Runs with --compile train what others train, within rounding."""

from pathlib import Path

import pytest
import torch
from dstrain import StateError, run
from dstrain_memory import compilation

from tests.support import everyday
from tests.support.runs import config, files, log, project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    torch._dynamo.reset()
    return project(tmp_path)


def test_a_compiled_run_leaves_the_weights_of_others_under_their_names(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without code of its own, torch's compiler changes no bit."""
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    swapped = {"blocks_to_swap": 2, "preview_prompt": ("a dog",), "max_steps": 3}
    plain = train(here, output_path=here / "plain", max_steps=3)
    compiled = train(here, output_path=here / "compiled", compile=True, **swapped)
    assert log(compiled) == log(plain)
    for name, weights in files(plain).items():
        found = files(compiled)[name]
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], value) for key, value in weights.items())
    with pytest.raises(StateError, match='"compile": true'):
        run(config(here, output_path=compiled, resume="auto", max_steps=4))


@pytest.mark.parametrize(
    "method",
    everyday.cases(
        ["fp8", "int8_block", "bitsandbytes_nf4"], lambda one: one == "int8_block"
    ),
)
def test_blocks_with_stored_weights_are_compiled_and_compute_the_same(
    method: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's backward pass of its own, and without code of its own."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    settings = {"max_steps": 2, "quant_options": f"dit:{method}"}
    plain = log(train(here, output_path=here / "plain", **settings))
    compiled = log(train(here, output_path=here / "compiled", compile=True, **settings))
    for one, other in zip(plain, compiled, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_the_code_that_torch_generates_computes_the_same_within_rounding(
    here: Path,
) -> None:
    """In fp32, losses differ by less than a millionth."""
    settings = {"max_steps": 1}  # each size of samples is compiled, for seconds
    plain = log(train(here, output_path=here / "plain", **settings))
    compiled = log(train(here, output_path=here / "compiled", compile=True, **settings))
    for one, other in zip(plain, compiled, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
