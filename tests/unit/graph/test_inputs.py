"""Checks of inputs, and prompts that a model cannot take whole."""

import re
from types import SimpleNamespace

import pytest
from dstrain.graph import LongPrompt, noticing_long_prompts
from dstrain.plugin import at_least, between, functional, one_of


def test_checks_say_nothing_of_what_is_right_and_what_is_expected_of_the_rest() -> None:
    assert at_least(2)(2) == at_least(2)(3.5) == ""
    assert "2" in at_least(2)(1)
    check = between(0, 100)
    assert check(0) == check(99.5) == check(100) == ""
    for outside in (127, -0.5):
        assert all(number in check(outside) for number in ("0", "100", str(outside)))
    assert one_of("canny", "depth")("depth") == ""
    for wrong in ("dept", ""):
        assert "canny, depth" in one_of("canny", "depth")(wrong)
    assert one_of("canny", "depth") != one_of("canny")


class Words:
    """A tokenizer with a token for each word, and one at the end."""

    def __call__(self, text: str, **options: object) -> SimpleNamespace:
        assert options == {"add_special_tokens": False, "verbose": False}
        return SimpleNamespace(input_ids=text.split())

    def num_special_tokens_to_add(self) -> int:
        return 1

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


def test_who_asks_last_is_told_of_a_prompt_that_is_cut_and_may_refuse_it() -> None:
    outer: list[LongPrompt] = []
    inner: list[LongPrompt] = []

    def refuse(found: LongPrompt) -> None:
        inner.append(found)
        raise ValueError(found.cut)

    def check(text: str) -> None:
        functional.check_length(Words(), text, 4, "T5", usual=True)

    with noticing_long_prompts(outer.append):
        check("a b c")
        assert not outer
        with noticing_long_prompts(refuse), pytest.raises(ValueError, match="d e"):
            check("a b c d e")
        check("a b c d e")
    assert inner == outer == [LongPrompt("T5", 5, 3, "d e", usual=True)]
    assert re.search(r" 5 .* T5 .* 3; .*'d e'", str(inner[0]))


def test_without_anyone_who_asks_no_prompt_is_measured() -> None:
    functional.check_length(None, "a", 0, "T5")
    functional.report_long_prompt(LongPrompt("T5", 5, 3, "d e"))
