"""A task is its loss: what it needs is read off the loss's signature."""

from typing import Any

import pytest
from dstrain import Task, UsageError
from dstrain.plugin import Column, Constant
from torch import Tensor


# The bodies of these are never called.
def plain(predict: Any, input_latents: Tensor, *, rng: Any) -> Tensor: ...
def sampled(predict: Any, seed: list[int], *, sampler: Any) -> Tensor: ...
def stepped(predict: Any, *, inference_sigmas: Any) -> Tensor: ...


def without_predict(input_latents: Tensor) -> Tensor: ...


def test_a_task_needs_what_its_loss_takes_beside_predict() -> None:
    task = Task.of("sft", plain)
    assert (task.name, task.branches, task.from_rows) == ("sft", ("positive",), True)
    assert dict(task.loss.inputs) == {"input_latents": True}
    assert task.loss.components == ("rng",)
    assert dict(task.inputs) == {}


def test_a_loss_without_predict_is_refused() -> None:
    with pytest.raises(UsageError, match="predict"):
        Task.of("sft", without_predict)


def test_only_a_loss_that_uses_the_sampler_runs_it() -> None:
    assert Task.of("distill", sampled).runs_sampler
    assert Task.of("imitate", stepped).runs_sampler
    assert not Task.of("sft", plain).runs_sampler


def test_a_loss_gets_a_list_of_what_differs_within_a_batch() -> None:
    inputs = {
        "seed": Column("seed", "integer"),
        "steps": Column("steps", "integer", same_in_batch=True),
        "scale": Constant(4.0),
    }
    assert Task.of("distill", sampled, inputs=inputs).listed == {"seed"}
