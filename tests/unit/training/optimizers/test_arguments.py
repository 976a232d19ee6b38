"""--optimizer_args are read as literals and checked against the constructor."""

import inspect
import math
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.training.optimizers.arguments import (
    check_arguments,
    in_kind_of,
    parameters_of,
    parse_arguments,
)
from torch.optim import SGD, AdamW


def test_values_are_literals_or_text() -> None:
    words = ("betas=0.9, 0.95", "eps=1e-6", "amsgrad=true", "foreach=None", "kind=abc")
    assert parse_arguments(words) == {
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "amsgrad": True,
        "foreach": None,
        "kind": "abc",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eps",), "expected NAME=VALUE"),
        (("=1",), "expected NAME=VALUE"),
        (("a.b=1",), "expected NAME=VALUE"),
        (("eps=1", "eps=2"), "eps is given twice"),
        (("lr=1",), "lr is given by --learning_rate"),
        (("weight_decay=1",), "weight_decay is given by --weight_decay"),
    ],
)
def test_words_that_are_none_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as found:
        parse_arguments(words)
    assert found.value.where == "--optimizer_args"


class Passing(SGD):
    """Takes what its base takes, and one more."""

    def __init__(self, params: Any, own: float = 1.0, **others: Any) -> None:
        super().__init__(params, **others)
        self.own = own


def test_arguments_of_the_base_count_where_they_are_passed_on() -> None:
    known = parameters_of(Passing)
    assert known["own"] == 1.0
    assert known["momentum"] == 0
    assert not {"params", "self", "others"} & known.keys()


class Needing(SGD):
    """Has no default of what it needs."""

    def __init__(self, params: Any, lr: float, needed: int) -> None:
        super().__init__(params, lr, momentum=needed)


def test_an_argument_without_a_default_has_none() -> None:
    assert parameters_of(Needing)["needed"] is inspect.Parameter.empty


def test_a_typo_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'betas'") as found:
        check_arguments("adamw", {"beta": (0.9, 0.9)}, parameters_of(AdamW))
    assert "eps" in str(found.value)


@pytest.mark.parametrize(
    ("default", "value", "want"),
    [
        ((0.9, 0.999), [0, 0.5], (0.0, 0.5)),
        ((0.9, 0.999), 0.9, None),
        ((0.9, 0.999), "0.9", None),
        ((0.9, 0.999), (), None),
        (1e-8, 1, 1.0),
        (1e-8, "x", None),
        (1e-8, True, None),
        (1e-8, math.inf, None),
        (math.inf, math.inf, math.inf),
        (5, 6, 6),
        (5, 6.5, None),
        (5, True, None),
        (0, 0.9, 0.9),
        (True, 1, None),
        (True, False, False),
        ("a", 1, None),
        (None, 0.3, 0.3),
    ],
)
def test_values_are_of_the_kind_of_the_default(
    default: Any, value: Any, want: Any
) -> None:
    found = in_kind_of(default, value)
    assert found == want and type(found) is type(want)


def test_a_value_of_another_kind_is_refused_with_the_default() -> None:
    with pytest.raises(UsageError, match=r"expected betas=0\.9,0\.999"):
        check_arguments("adamw", {"betas": 0.9}, parameters_of(AdamW))
