"""What a row gives beside its plain sample: captions, flips and crops, of which each draw
takes one.

They depend on nothing but what is written in the row and the options: equal rows share
what is computed from them, and another seed needs nothing new.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unicodedata import normalize

from dstrain.errors import UsageError

TRIGGER = "[trigger]"
"""Stands for the trigger word in captions."""
SEPARATOR = ","
"""Between the tags of a caption."""
WHOLE = 10**6
"""The weight of a caption, of which a dropout takes its part."""

WITHOUT_BLANKS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
"""Characters of scripts that put no blanks between words."""
IN_WORDS = rf"[^\W{WITHOUT_BLANKS}]"
"""A letter, digit or underscore of the other scripts."""

WeightedCaption = tuple[int, str]
"""A caption and how probable it is, in proportion to the others of its row."""


@dataclass(frozen=True)
class CaptionOptions:
    """What is made of the text in a row."""

    dropout: float = 0.0
    """How probable the empty caption is, 0 to less than 1."""
    shuffle_tags: bool = False
    keep_tags: int = 0
    """Tags at the start that stay where they are."""
    variants: int = 1
    """Orders of the tags, the written one included."""
    split_lines: bool = False
    """Whether each line is a caption of its own."""
    trigger: str = ""
    """Put in place of TRIGGER; where a caption has neither (`has_word`), before it."""
    prefix: str = ""
    suffix: str = ""

    def captions(self, written: str | Sequence[str]) -> list[WeightedCaption]:
        """Return the captions of a row, each once, the first as it is written.

        written: The text of the cell, or several that are equally probable.
        """
        texts = [written] if isinstance(written, str) else list(written)
        if self.split_lines:
            lines = [line.strip() for text in texts for line in text.splitlines()]
            texts = [line for line in lines if line]
        weights: dict[str, int] = {}
        weight = round(WHOLE * (1 - self.dropout))
        dropped = 0
        for text in texts or [""]:
            for caption in self._orders(text):
                complete = self.prefix + self._with_trigger(caption) + self.suffix
                weights[complete] = weights.get(complete, 0) + weight
                dropped += WHOLE - weight
        if dropped:
            weights[""] = weights.get("", 0) + dropped
        return [(weight, text) for text, weight in weights.items()]

    def _with_trigger(self, caption: str) -> str:
        if TRIGGER in caption:
            if not self.trigger:
                what = f"is not given, and a text has {TRIGGER}, in whose place it would be"
                raise UsageError("--trigger_word", what)
            return caption.replace(TRIGGER, self.trigger)
        if not self.trigger or has_word(caption, self.trigger):
            return caption
        return f"{self.trigger}, {caption}" if caption else self.trigger

    def _orders(self, caption: str) -> list[str]:
        """Return the caption as it is written, and with its tags in other orders."""
        if not self.shuffle_tags:
            return [caption]
        tags = [tag.strip() for tag in caption.split(SEPARATOR) if tag.strip()]
        first, others = tags[: self.keep_tags], tags[self.keep_tags :]
        orders = [caption]
        for number in range(1, self.variants):
            shuffled = sorted(
                range(len(others)), key=lambda tag: _number(caption, number, tag)
            )
            orders.append(", ".join([*first, *(others[tag] for tag in shuffled)]))
        return orders


def has_word(caption: str, word: str) -> bool:
    """Return whether a word, or several, stand in a caption and are no part of a longer
    one: "art" is not in "party", nor in "art2".

    Scripts that put no blanks between words (Chinese, Japanese, Thai) have no longer
    words: there any place counts.
    """
    caption, word = (normalize("NFC", text) for text in (caption, word))
    before = _letters_beside(word[0])
    after = _letters_beside(word[-1])
    pattern = rf"(?<!{before}){re.escape(word)}(?!{after})"
    return re.search(pattern, caption) is not None


def _letters_beside(end: str) -> str:
    """Return a pattern of the characters that would make a word longer at this end: none
    where it ends in a sign or in a script without blanks.
    """
    return IN_WORDS if re.fullmatch(IN_WORDS, end) else r"(?!)"


def _number(caption: str, variant: int, tag: int) -> bytes:
    """Return a random number of a tag, by which tags are sorted."""
    key = f"{variant}\n{tag}\n{caption}"
    return hashlib.blake2b(key.encode(), digest_size=8).digest()


CENTRE = 0.5


class View(NamedTuple):
    """How an image is seen that is scaled to cover a size."""

    flip: bool = False
    """Whether it is mirrored left to right."""
    crop: float = CENTRE
    """Where it is cropped: 0 at the left or the top of what is cut off, 1 at its right or
    bottom.
    """


PLAIN = View()
WeightedView = tuple[int, View]
"""A view and how probable it is, in proportion to the others of its row."""


@dataclass(frozen=True)
class AugmentationOptions:
    """What is made of the images and videos of a row, of all of them alike."""

    flip: bool = False
    crops: int = 1
    """Places at which images are cropped, evenly spaced."""

    def views(self, is_cropped: bool) -> list[WeightedView]:
        """Return the views of a row, the plain one first.

        is_cropped: Whether anything of its images is cut off: else all crops are
            the same, and there is one.
        """
        places = [(number + 0.5) / self.crops for number in range(self.crops)]
        places.sort(key=lambda place: abs(place - CENTRE))
        if not is_cropped:
            places = [CENTRE]
        flips = (False, True) if self.flip else (False,)
        views = [(1, View(flip, place)) for flip in flips for place in places]
        # Validation takes the first: the centre, which an even number of crops has not.
        return views if places[0] == CENTRE else [(0, PLAIN), *views]


NO_AUGMENTATION = AugmentationOptions()
