"""A prompt that is cut is said, or refused."""

import logging

import pytest
from dstrain import UsageError
from dstrain.generation.prompts import notice
from dstrain.graph import LongPrompt


def test_a_prompt_is_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    usual = LongPrompt("CLIP", 80, 75, "the end", usual=True)
    long = LongPrompt("T5", 600, 511, "the end")
    notice("error", "--prompt", usual)
    notice("truncate", "--prompt", long)
    warnings = [
        one.getMessage() for one in caplog.records if one.levelno == logging.WARNING
    ]
    assert warnings == [f"--prompt: {usual}", f"--prompt: {long}"]
    with pytest.raises(UsageError, match="--prompt: prompt has 600 tokens"):
        notice("error", "--prompt", long)
