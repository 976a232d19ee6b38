"""A caption is one line of text, with what is put around it."""

import pytest
from dstrain.data import CaptionOptions
from dstrain_tools.captioning.text import caption_of, clean

PLAIN = CaptionOptions()


def test_lines_and_blanks_become_single_blanks() -> None:
    assert clean("  A cat.\n\n\tIt\u3000sleeps. \x00\x1b") == "A cat. It sleeps."


def test_half_a_character_at_the_end_is_left_out() -> None:
    assert clean("a caf\ufffd") == "a caf"


@pytest.mark.parametrize("text", ("", " \n\t", "\x00", "\ufffd"))
def test_a_text_of_blanks_is_no_caption(text: str) -> None:
    with pytest.raises(ValueError, match="the model wrote no caption"):
        caption_of(text, CaptionOptions(trigger="sks", prefix="photo, "))


def test_half_a_pair_of_surrogates_is_no_caption() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        caption_of("a \ud800 cat", PLAIN)


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("a cat", "in oil, sks, a cat."),
        ("a sks cat", "in oil, a sks cat."),
        ("a skset cat", "in oil, sks, a skset cat."),
    ),
)
def test_the_trigger_word_is_added_once_inside_prefix_and_suffix(
    text: str, expected: str
) -> None:
    additions = CaptionOptions(trigger="sks", prefix="in oil, ", suffix=".")
    assert caption_of(text, additions) == expected
