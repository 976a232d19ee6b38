"""Rows with long prompts are refused, or named once, in the log in full."""

import logging
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.graph import LongPrompt
from dstrain.runs.long_prompts import LongPromptLog, note_recorded, record, recorded

LONG = LongPrompt("T5", 600, 511, "the end " * 40)
USUAL = LongPrompt("CLIP", 600, 75, "the end", usual=True)


def place_of(row: int) -> str:
    return f"metadata.csv:{row + 2}"


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """The messages of a level, in order."""
    return [one.getMessage() for one in caplog.records if one.levelno == level]


def test_an_error_names_the_row_and_what_is_cut() -> None:
    log = LongPromptLog("error", place_of)
    log.note(0, USUAL)
    with pytest.raises(UsageError, match=r"prompt: has .* T5 takes 511.*the end"):
        log.note(1, LONG)


def test_each_row_is_logged_once_in_full_and_counted_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "dstrain")
    log = LongPromptLog("truncate", place_of)
    for row, found in ((4, LONG), (1, USUAL), (1, LONG), (4, LONG)):
        log.note(row, found)
    assert not said(caplog, logging.WARNING)
    lines = said(caplog, logging.INFO)
    assert len(lines) == 3 and lines[0] == f"metadata.csv:6: {LONG}"
    log.conclude()
    (warning,) = said(caplog, logging.WARNING)
    assert warning.startswith("prompts of 2 rows are cut: metadata.csv:3: prompt")
    assert warning.index("T5") < warning.index("CLIP") and "..." in warning


def test_a_long_run_warns_at_once_and_counts_only_more_than_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = LongPromptLog("truncate", place_of, warns_at_once=True)
    log.note(4, LONG)
    log.conclude()
    (warning,) = said(caplog, logging.WARNING)
    assert warning.startswith("metadata.csv:6: prompt has 600 tokens")


def test_records_are_read_by_address_also_after_a_kill(tmp_path: Path) -> None:
    record(tmp_path, 0, "a.emb", LONG)
    record(tmp_path, 1, "a.emb", LONG)
    record(tmp_path, 1, "b.emb", USUAL)
    with (tmp_path / "long_prompts-1.jsonl").open("a") as file:
        file.write('{"at": "c.e')
    assert recorded(tmp_path) == {"a.emb": [LONG], "b.emb": [USUAL]}
    log = LongPromptLog("truncate", place_of)
    rows = iter([(0, ["x.emb", "a.emb"]), (1, ["x.emb"]), (2, ["b.emb"])])
    note_recorded(log, tmp_path, rows)
    assert sorted(row for _, row, _ in log.rows) == [0, 2]
