"""--lora_rank and --lora_alpha are one number, or one for each pattern of layers."""

import pytest
from dstrain import UsageError
from dstrain.config.layer_numbers import LayerNumbers, parse_alphas, parse_ranks


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (16, LayerNumbers(16)),
        ("16", LayerNumbers(16)),
        ("attn=32, ff=8", LayerNumbers(None, (("attn", 32), ("ff", 8)))),
        ("16,ff=8", LayerNumbers(16, (("ff", 8),))),
    ],
)
def test_ranks_that_are_written_are_understood(
    value: int | str, want: LayerNumbers[int]
) -> None:
    assert parse_ranks(value) == want


def test_alphas_may_be_absent_and_need_not_be_whole() -> None:
    assert parse_alphas(None) == LayerNumbers(None)
    assert parse_alphas(0.5) == LayerNumbers(0.5)
    assert parse_alphas("1,ff=2.5") == LayerNumbers(1.0, (("ff", 2.5),))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "is empty"),
        ("attn=x", "'x' is not a valid integer"),
        ("attn=1.5", "'1.5' is not a valid integer"),
        ("attn=0", "expected 1 or more, got 0"),
        ("8,attn=99999999999999999999", "expected 32,768 or less, got 9999"),
        ("32769", "expected 32,768 or less, got 32769"),
        ("=1", "expected PATTERN=NUMBER"),
        ("attn=1,2", "after the first number"),
        ("attn=1,attn=2", "attn is given twice"),
    ],
)
def test_what_is_no_rank_is_refused(value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as found:
        parse_ranks(value)
    assert found.value.where == "--lora_rank"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ff=x", "'x' is not a valid float"),
        ("ff=inf", "expected a finite number"),
        ("ff=0", "expected more than 0"),
    ],
)
def test_what_is_no_alpha_is_refused(value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as found:
        parse_alphas(value)
    assert found.value.where == "--lora_alpha"
