"""Notice prompts that are longer than a model takes: units report them, runs name the row."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LongPrompt:
    """A prompt that is longer than a model takes."""

    model: str
    """What reads the prompt: 'T5'."""
    tokens: int
    """Tokens of the text, special ones left out."""
    limit: int
    """The number of these that the model takes."""
    cut: str
    """The text that it does not see."""
    usual: bool = False
    """Whether the model is meant to see the beginning alone: never an error."""

    def __str__(self) -> str:
        return (
            f"prompt has {self.tokens} tokens, but {self.model} takes {self.limit}; "
            f"not seen: {self.cut!r}"
        )


Notice = Callable[[LongPrompt], object]
_notice: ContextVar[Notice | None] = ContextVar("long_prompts", default=None)


def report_long_prompt(found: LongPrompt) -> None:
    """Tell the run of a prompt that a unit cuts; the run may refuse it by raising."""
    notice = _notice.get()
    if notice is not None:
        notice(found)


def check_length(
    tokenizer: Any, text: str, limit: int, model: str, usual: bool = False
) -> None:
    """Report a text of which a tokenizer of transformers keeps only the first `limit`
    tokens, special ones included; `model` and `usual` are as in `LongPrompt`.
    """
    if _notice.get() is None:
        return
    kept = limit - tokenizer.num_special_tokens_to_add()
    # Not verbose: transformers would warn of what is reported here.
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) > kept:
        cut = tokenizer.decode(ids[kept:])
        report_long_prompt(LongPrompt(model, len(ids), kept, cut, usual))


@contextmanager
def noticing_long_prompts(notice: Notice) -> Iterator[None]:
    """Call a function for each long prompt that units report within the block."""
    token = _notice.set(notice)
    try:
        yield
    finally:
        _notice.reset(token)
