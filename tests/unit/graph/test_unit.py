"""A unit's signature is its declaration; a task is a loss's signature."""

from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any, TypedDict

import pytest
import torch
from dstrain import Task, UsageError
from dstrain.graph import code_of
from dstrain.graph.unit import Unit
from dstrain.plugin import versioned
from PIL.Image import Image
from torch import Tensor


class Prompt(TypedDict):
    emb: Tensor
    mask: Tensor | None


class Number(TypedDict):
    result: int


def encode(
    prompt: str, image: Image | None = None, *, text_encoder: Any, tokenizer: Any
) -> Prompt:
    return {"emb": torch.ones(1), "mask": None}


def test_inputs_components_and_outputs_are_the_signature() -> None:
    unit = Unit(encode)
    assert unit.name == "encode"
    assert dict(unit.inputs) == {"prompt": True, "image": False}
    assert unit.required == ("prompt",)
    assert unit.components == ("text_encoder", "tokenizer")
    assert dict(unit.outputs) == {"emb": "tensor", "mask": "tensor | none"}


def star(*values: int) -> Prompt: ...
def stars(**values: int) -> Prompt: ...
def positional(value: int, /) -> Prompt: ...
def untyped(value: int): ...  # noqa: ANN201  # what is tested is that it says nothing of what it returns
def plain_dict(value: int) -> dict[str, Tensor]: ...


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (star, "values"),
        (stars, "values"),
        (positional, "value"),
        (untyped, "TypedDict"),
        (plain_dict, "TypedDict"),
    ],
)
def test_incomplete_declaration_is_refused_naming_function_and_fault(
    function: Callable[..., Any], fault: str
) -> None:
    with pytest.raises(UsageError, match=rf"\.{function.__name__}\b.*{fault}"):
        Unit(function)


@pytest.mark.parametrize(
    "made", [{"emb": 1}, {"emb": 1, "mask": 2, "more": 3}, {}, None, (1, 2), "emb"]
)
def test_a_unit_must_return_a_record_of_the_keys_that_it_declares(made: Any) -> None:
    def drifts() -> Prompt:
        return made

    with pytest.raises(UsageError, match=r"\['emb', 'mask'\]") as caught:
        Unit(drifts).run({}, {})
    assert caught.value.where == "unit drifts"


def test_a_buffer_that_is_returned_again_leaves_earlier_outputs_as_they_are() -> None:
    class Filled(TypedDict):
        filled: Tensor

    buffer = torch.zeros(2)

    def fill(number: int) -> Filled:
        return {"filled": buffer.fill_(number)}

    first, second = (Unit(fill).run({"number": i}, {})["filled"] for i in (1, 2))
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])


def test_a_unit_is_its_module_name_and_outputs_and_its_version_or_its_code() -> None:
    outputs = Unit(encode).outputs
    here = {"module": __name__, "name": "encode", "outputs": dict(outputs)}
    assert dict(Unit(encode).identity) == {**here, **code_of(encode).facts}
    numbered = wraps(encode)(lambda: None)
    versioned(3)(numbered)
    assert dict(Unit(numbered).identity) == {**here, "version": 3}

    # What wraps it is another function.
    @wraps(numbered)
    def wrapped() -> None: ...

    assert Unit(wrapped).version == 0


def test_a_unit_without_source_needs_a_version() -> None:
    other = FunctionType(
        encode.__code__.replace(co_name="other"), encode.__globals__, "other"
    )
    other.__annotations__ = {"return": Number}
    with pytest.raises(UsageError, match=rf"unit {__name__}.other: .*version"):
        assert Unit(other).identity
    assert Unit(versioned(1)(other)).identity["version"] == 1


def test_a_unit_may_call_its_function_in_its_own_way() -> None:
    class Twice(Unit):
        def call(self, arguments: Mapping[str, Any]) -> Any:
            return super().call({**arguments, "number": 2 * arguments["number"]})

    def double(number: int) -> Number:
        return {"result": number}

    assert Twice(double).run({"number": 3}, {}) == {"result": 6}


# The bodies of these are never called.
def plain(predict: Any, input_latents: Tensor, *, rng: Any) -> Tensor: ...
def without_predict(input_latents: Tensor) -> Tensor: ...


def test_a_task_needs_what_its_loss_takes_beside_predict() -> None:
    task = Task.of("sft", plain)
    assert (task.name, task.branches, task.from_rows) == ("sft", ("positive",), True)
    assert dict(task.loss.inputs) == {"input_latents": True}
    assert task.loss.components == ("rng",)
    with pytest.raises(UsageError, match="predict"):
        Task.of("sft", without_predict)
