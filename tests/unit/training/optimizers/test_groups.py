"""Components have learning rates of their own, and no name is ignored."""

import pytest
import torch
from dstrain import UsageError
from dstrain.config import parse_learning_rates
from dstrain.training.optimizers import check_names
from dstrain.training.optimizers.groups import parameter_groups
from torch import nn

NAMES = ("dit.blocks.0.weight", "dit.norm.weight", "text_encoder.weight")
PARAMETERS = {name: nn.Parameter(torch.zeros(1)) for name in NAMES}


def rates_of(value: float | str) -> list[tuple[float, list[str]]]:
    groups = parameter_groups(PARAMETERS, parse_learning_rates(value, 1.0))
    names = {id(one): name for name, one in PARAMETERS.items()}
    return [(g["lr"], [names[id(one)] for one in g["params"]]) for g in groups]


def test_one_rate_is_one_group_in_the_order_of_the_parameters() -> None:
    assert rates_of(0.5) == [(0.5, list(NAMES))]
    assert rates_of("dit=0.5,text_encoder=0.5") == [(0.5, list(NAMES))]


def test_each_component_has_its_own() -> None:
    assert rates_of("dit=0.5,text_encoder=0.1") == [
        (0.5, list(NAMES[:2])),
        (0.1, [NAMES[2]]),
    ]
    assert rates_of("1,dit.blocks=0.5") == [(0.5, [NAMES[0]]), (1.0, list(NAMES[1:]))]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1,dit.block=1", "nothing of 'dit.block' is trained; did you mean 'dit.blocks.0'"),
        ("dit.blocks=1,text_encoder=1", "1 trained parameters have none: dit.norm.weight"),
    ],
)  # fmt: skip
def test_names_that_fit_nothing_and_parameters_without_one_are_refused(
    value: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        rates_of(value)


TRAINED = ("transformer", "text_encoder")


def test_a_name_may_stand_for_several_components() -> None:
    rates = parse_learning_rates("1,dit.blocks=0.5", 1.0)
    found = check_names(rates, TRAINED, {"dit": ("transformer", "transformer_2")})
    assert found.by_name == {"transformer.blocks": 0.5}


def test_the_denoisers_name_is_that_of_an_expert_where_that_is_trained() -> None:
    both = {"dit": ("dit", "dit2")}
    for value in ("dit=2,dit2=1", "dit2=1,dit=2"):
        rates = parse_learning_rates(value, 1.0)
        assert check_names(rates, ("dit", "dit2"), both).by_name == {
            "dit": 2,
            "dit2": 1,
        }
    for value, components in (("dit=2", ("dit2",)), ("1,dit=2", ("dit2", "vae"))):
        other = check_names(parse_learning_rates(value, 1.0), components, both)
        assert other.of("dit2") == 2


@pytest.mark.parametrize(
    ("value", "components", "plain"),
    [
        ("dit=2", ("dit",), 2),
        ("1,dit=2", ("dit",), 2),
        ("2,dit=2", ("dit",), 2),
        ("dit=2,vae=2", ("dit", "vae"), 2),
        ("dit=2,vae=1", ("dit", "vae"), "dit=2,vae=1"),
        ("2,dit=2", ("dit", "vae"), "2,dit=2"),
        ("dit=2,dit.blocks=1", ("dit",), "dit=2,dit.blocks=1"),
    ],
)
def test_one_rate_for_all_is_one_number_however_it_is_written(
    value: str, components: tuple[str, ...], plain: float | str
) -> None:
    found = check_names(parse_learning_rates(value, 1.0), components, {})
    assert found.plain == plain


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1,text_encode=1", "'text_encode' is not trained; did you mean 'text_encoder'"),
        ("text_encoder=1", "transformer is trained, too, and has none"),
    ],
)  # fmt: skip
def test_components_are_checked_before_anything_is_loaded(
    value: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_names(parse_learning_rates(value, 1.0), TRAINED, {})


def test_b_matrices_learn_at_a_multiple() -> None:
    layer = "dit.to_q.lora_{}.default.weight"
    own = {layer.format(one): nn.Parameter(torch.zeros(1)) for one in "AB"}
    rates = parse_learning_rates(0.5, 1.0)
    down, up = parameter_groups(own, rates, 16.0)
    assert (down["lr"], up["lr"]) == (0.5, 8.0)
    assert up["params"][0] is own[layer.format("B")]
    assert len(parameter_groups(own, rates, 1.0)) == 1
