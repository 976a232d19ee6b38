"""--learning_rate is one number, or one for each component."""

import pytest
from dstrain import UsageError
from dstrain.config import LearningRates, parse_learning_rates


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (None, LearningRates(1.0)),
        (1e-4, LearningRates(1e-4)),
        ("1e-4", LearningRates(1e-4)),
        ("dit=1e-4, text_encoder=1e-5", LearningRates(None, {"dit": 1e-4, "text_encoder": 1e-5})),
        ("2e-4,text_encoder=1e-5", LearningRates(2e-4, {"text_encoder": 1e-5})),
    ],
)  # fmt: skip
def test_what_is_written_is_understood(
    value: float | str | None, want: LearningRates
) -> None:
    assert parse_learning_rates(value, 1.0) == want
    if value is not None:
        assert parse_learning_rates(str(want), 1.0) == want


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "is empty"),
        ("dit=x", "'x' is not a valid float"),
        ("dit=nan", "finite"),
        ("dit=-1", "more than 0"),
        ("=1", "COMPONENT=NUMBER"),
        ("dit=1,2", "after the first number"),
        ("dit=1,dit=2", "given twice"),
    ],
)
def test_what_is_neither_is_refused(value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as found:
        parse_learning_rates(value, 1.0)
    assert found.value.where == "--learning_rate"


def test_the_longest_name_wins() -> None:
    rates = parse_learning_rates("1,dit=2,dit.blocks.3=3", 1.0)
    assert rates.of("dit.blocks.3.weight") == 3
    assert rates.of("dit.blocks.30.weight") == 2
    assert rates.of("text_encoder.weight") == 1
    assert parse_learning_rates("dit=2", 1.0).of("vae") is None


def test_all_are_lowered_together() -> None:
    assert parse_learning_rates("1,dit=2", 1.0).times(0.5).plain == "0.5,dit=1"
    assert parse_learning_rates(2.0, 1.0).times(0.5).plain == 1.0
