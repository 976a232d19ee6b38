"""Make a caption of what a model wrote."""

import unicodedata

from dstrain.data import CaptionOptions as Additions, text_fault

LOST = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, such as the half of one at the
last token."""


def clean(text: str) -> str:
    """Return a text on one line, without blanks that say nothing and without characters
    that nobody sees.
    """
    text = text.replace(LOST, " ")
    kept = (" " if unicodedata.category(one) == "Cc" else one for one in text)
    return " ".join("".join(kept).split())


def caption_of(text: str, additions: Additions) -> str:
    """Return the caption to write; raises ValueError for a text that is none.

    Args:
        text: What the model wrote.
        additions: What is put before and after it.
    """
    cleaned = clean(text)
    if not cleaned:
        raise ValueError("the model wrote no caption")
    ((_, caption),) = additions.captions(cleaned)
    if fault := text_fault(caption):
        raise ValueError(f"the caption {fault}")
    return caption
