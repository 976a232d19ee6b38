"""A row's captions: what is made of a text, each once, with how probable it is."""

from collections import Counter

import pytest
from dstrain import UsageError
from dstrain.data import CaptionOptions


def texts(options: CaptionOptions, written: str | list[str]) -> list[str]:
    return [text for _, text in options.captions(written)]


def shares(options: CaptionOptions, written: str | list[str]) -> dict[str, float]:
    """How probable each caption is."""
    found = options.captions(written)
    total = sum(weight for weight, _ in found)
    return {text: weight / total for weight, text in found}


def test_without_options_a_caption_is_what_is_written() -> None:
    for written in ("a dog", "", " a,b\n", "[triggers]"):
        assert texts(CaptionOptions(), written) == [written]


@pytest.mark.parametrize("dropout", [0.1, 0.25, 0.9])
@pytest.mark.parametrize("written", ["a", ["a", "b", "c"]])
def test_dropout_is_the_probability_of_the_empty_caption(
    dropout: float, written: str | list[str]
) -> None:
    options = CaptionOptions(dropout, True, variants=3, prefix="photo of ")
    assert shares(options, written)[""] == pytest.approx(dropout, abs=1e-6)
    # Validation takes the first.
    assert texts(options, written)[0] == "photo of a"


def test_tags_are_shuffled_but_for_those_that_are_kept() -> None:
    written = "red, small ,round,  old,wet"
    options = CaptionOptions(shuffle_tags=True, keep_tags=2, variants=5)
    found = texts(options, written)
    assert found[0] == written
    assert len(found) == 5
    for text in found[1:]:
        tags = text.split(", ")
        assert tags[:2] == ["red", "small"]
        assert Counter(tags) == Counter(["red", "small", "round", "old", "wet"])
    assert found == texts(options, written)


def test_every_order_is_as_probable_as_the_others() -> None:
    options = CaptionOptions(shuffle_tags=True, variants=1000)
    found = shares(options, "a, b, c")
    assert len(found) == 6
    # Six standard deviations of a binomial distribution of 1,000 times 1/6.
    assert all(abs(share - 1 / 6) < 0.071 for share in found.values())


def test_each_line_can_be_a_caption() -> None:
    options = CaptionOptions(split_lines=True)
    written = ["a dog\r\n\n  a wet dog \n", "a cat"]
    assert texts(options, written) == ["a dog", "a wet dog", "a cat"]
    assert texts(options, "\n") == [""]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a photo of [trigger] in rain, [trigger]", "a photo of sks in rain, sks"),
        ("a photo of sks", "a photo of sks"),
        ("sks, [trigger] in rain", "sks, sks in rain"),
        ("a dog", "sks, a dog"),
        ("", "sks"),
    ],
)
def test_the_trigger_word_is_in_every_caption(written: str, expected: str) -> None:
    assert texts(CaptionOptions(trigger="sks"), written) == [expected]


def test_the_place_of_a_trigger_word_is_no_caption() -> None:
    with pytest.raises(UsageError) as caught:
        CaptionOptions().captions("a photo of [trigger]")
    assert caught.value.where == "--trigger_word"


PARTS_OF_WORDS = [
    ("art", "a birthday party"),
    ("art", "art2 of an artist"),
    ("art", "ART, smart_art"),
    ("ohwx man", "ohwx manual"),
    ("é", "café"),
    ("sks!", "sks, wet"),
    ("c++", "ac++"),
    ("猫", "犬の写真"),
]
WORDS = [
    ("art", "art"),
    ("art", "modern art, (art:1.2)"),
    ("art", "party art"),
    ("ohwx man", "an ohwx man's hat"),
    ("sks!", "wet sks! dog"),
    ("c++", "a c++book"),
    ("<s1>", "a<s1>b"),
    ("猫", "黒猫の写真"),
    ("sks", "黒いsksの写真"),
    ("caf\u00e9", "a cafe\u0301 man"),
    ("cafe\u0301", "a caf\u00e9 man"),
]


@pytest.mark.parametrize(("trigger", "caption"), [*PARTS_OF_WORDS, *WORDS])
def test_the_trigger_word_is_no_part_of_a_longer_word_but_in_scripts_without_blanks(
    trigger: str, caption: str
) -> None:
    is_there = (trigger, caption) in WORDS
    wanted = caption if is_there else f"{trigger}, {caption}"
    assert texts(CaptionOptions(trigger=trigger), caption) == [wanted]


def test_prefix_and_suffix_stand_around_all_but_a_dropped_caption() -> None:
    options = CaptionOptions(
        dropout=0.5, trigger="sks", prefix="old ", suffix=" now", variants=1
    )
    assert texts(options, "dog") == ["old sks, dog now", ""]
