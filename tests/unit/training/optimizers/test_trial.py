"""An optimizer is tried on a tiny matrix: what it can do is seen, not believed."""

import pytest
import torch
from bitsandbytes.optim import Lion8bit
from dstrain.training.optimizers import Trial, steps_by_rows
from dstrain.training.optimizers.trial import (
    construct,
    enter_training,
    steps_apart,
    try_optimizer,
)
from prodigyopt import Prodigy
from pytorch_optimizer import SOAP, DAdaptAdam, Lion, StableAdamW
from schedulefree import AdamWScheduleFree
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer


def tried(kind: type[Optimizer]) -> Trial:
    return try_optimizer("--optimizer", kind.__name__, kind, {"lr": 0.1}, {})


def test_what_takes_matrices_alone_is_seen() -> None:
    assert tried(AdamW).takes_vectors
    assert not tried(Muon).takes_vectors


def test_what_takes_one_rate_alone_is_seen() -> None:
    assert tried(AdamW).takes_rates
    assert not tried(Prodigy).takes_rates


def test_the_state_is_that_after_a_step() -> None:
    (moments,) = tried(AdamW).state["state"].values()
    assert moments["step"] == 1
    assert moments["exp_avg"].numel() >= 4096  # enough for 8-bit optimizers


def test_the_trial_leaves_generators_alone() -> None:
    before = torch.get_rng_state()
    tried(SGD)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_steps_with_one_at_a_time_is_seen() -> None:
    for kind in (AdamW, Muon, SOAP, Lion8bit):
        assert steps_apart(kind, {"lr": 0.1}), kind
    for kind in (Prodigy, DAdaptAdam):
        for rate in (1.0, 1e-3):
            assert not steps_apart(kind, {"lr": rate}), kind


def test_what_steps_with_rows_as_with_the_whole_is_seen() -> None:
    for kind in (AdamW, SGD, Lion, AdamWScheduleFree):
        assert steps_by_rows(kind, {"lr": 0.1}), kind
    for kind in (Muon, SOAP, Lion8bit, Adafactor, StableAdamW, Prodigy):
        assert not steps_by_rows(kind, {"lr": 0.1}), kind


def test_what_optimizers_print_is_not_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    construct(Prodigy, [torch.nn.Parameter(torch.zeros(1))], {"decouple": True})
    assert capfd.readouterr().out == ""


def test_modes_are_switched_where_there_are_any() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    free = AdamWScheduleFree([parameter])
    enter_training(free)
    assert free.param_groups[0]["train_mode"]
    enter_training(SGD([parameter], 1.0))
