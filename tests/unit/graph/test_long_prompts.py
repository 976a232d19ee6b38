"""Units report prompts that are too long, with the text that is cut; who asks is told."""

from types import SimpleNamespace

import pytest
from dstrain.graph import LongPrompt, noticing_long_prompts
from dstrain.graph.long_prompts import check_length, report_long_prompt


class Words:
    """A tokenizer with a token for each word, and one at the end."""

    def __call__(self, text: str, **options: object) -> SimpleNamespace:
        assert options == {"add_special_tokens": False, "verbose": False}
        return SimpleNamespace(input_ids=text.split())

    def num_special_tokens_to_add(self) -> int:
        return 1

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


def test_special_tokens_are_no_text() -> None:
    found: list[LongPrompt] = []
    with noticing_long_prompts(found.append):
        check_length(Words(), "a b c", 4, "T5")
        assert not found
        check_length(Words(), "a b c d e", 4, "T5", usual=True)
    assert found == [LongPrompt("T5", 5, 3, "d e", usual=True)]
    said = "prompt has 5 tokens, but T5 takes 3; not seen: 'd e'"
    assert str(found[0]) == said


def test_without_anyone_who_asks_nothing_is_counted() -> None:
    check_length(None, "a", 0, "T5")
    report_long_prompt(LongPrompt("T5", 5, 3, "d e"))


def test_who_asks_last_is_told_and_may_refuse() -> None:
    outer: list[LongPrompt] = []
    inner: list[LongPrompt] = []

    def refuse(found: LongPrompt) -> None:
        inner.append(found)
        raise ValueError(found.cut)

    long = LongPrompt("T5", 5, 3, "d e")
    with noticing_long_prompts(outer.append):
        with noticing_long_prompts(refuse), pytest.raises(ValueError, match="d e"):
            report_long_prompt(long)
        report_long_prompt(long)
    assert (inner, outer) == ([long], [long])
