"""Rows with long prompts are refused, or named once, in the log in full."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.graph import LongPrompt
from dstrain.plugin.functional import report_long_prompt

from tests.support import family
from tests.support.runs import train

pytestmark = pytest.mark.usefixtures("short_sighted")
LONG_ROW = "metadata.json:3"
"""'two dogs on a bridge', of which T5 here takes 12 letters."""


def encode_prompt(prompt: str, *, text_encoder: Any, tokenizer: Any) -> family.Prompt:
    """Report what two models do not see, of which one is meant to see little."""
    for model, limit, usual in (("CLIP", 3, True), ("T5", 12, False)):
        if cut := prompt[limit:]:
            long = LongPrompt(model, len(prompt), limit, cut * 20, usual)
            report_long_prompt(long)
    return family.encode_prompt(prompt, text_encoder=text_encoder, tokenizer=tokenizer)


@pytest.fixture
def short_sighted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that take few letters."""
    units = (encode_prompt, family.encode_image)
    spec = replace(family.BASE, units=units)
    monkeypatch.setitem(family.PIPELINES, "base", spec)


def warnings_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("dstrain: warning: ")]


@pytest.mark.parametrize("place", ["out/logs", "cache"])
def test_each_row_is_logged_once_in_full_and_counted_at_the_end(
    place: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {"output_path": tmp_path / "out", "num_epochs": 2}
    if place == "cache":
        flags |= {"task": "sft:data_process", "feature_cache": tmp_path / "cache"}
    train(here, **flags)
    log = (tmp_path / place / "dstrain.log").read_text().splitlines()
    lines = [line for line in log if " T5 " in line and "..." not in line]
    assert len(lines) == 1
    assert f"{LONG_ROW}: " in lines[0] and lines[0].endswith("a bridge'")
    # Two prompts are longer than the three letters of CLIP, which is usual.
    (said,) = warnings_of(capsys)
    assert "T5" in said and "CLIP" not in said and "..." in said
    # A run that takes long says it at once.
    assert ("rows like it" in said) == (place == "out/logs")


@pytest.mark.usefixtures("wide_page")
def test_rows_of_a_second_dataset_are_named_by_its_own_name_and_counted_apart(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captions = ("ten dogs on a bridge", "two cats on a bridge")
    family.write_data(tmp_path / "val", captions, ((16, 16),))
    second = {"validation_dataset_base_path": tmp_path / "val"}
    train(here, output_path=tmp_path / "out", num_epochs=1, **second)
    said = warnings_of(capsys)
    named = [one for one in said if "validation metadata.json:1: " in one]
    assert [" 2 rows " in one for one in named] == [False, True]
    assert len(said) == 3


def test_what_stage_1_cut_stage_2_knows_of(here: Path, tmp_path: Path) -> None:
    cache = {"feature_cache": tmp_path / "cache", "output_path": tmp_path / "out"}
    train(here, task="sft:data_process", **cache)
    (record,) = (tmp_path / "cache").glob("long_prompts-*.jsonl")
    with record.open("a") as file:
        file.write('{"at": "c.e')
    with pytest.raises(UsageError) as caught:
        train(here, task="sft:train", on_long_prompt="error", **cache)
    assert caught.value.where == LONG_ROW
    train(here, task="sft:train", **cache)
    # Nor does stage 1 compute what is new beside it.
    shards = [*(tmp_path / "cache/shards").iterdir()]
    strict: dict[str, Any] = {"on_long_prompt": "error", "max_pixels": 64, **cache}
    with pytest.raises(UsageError):
        train(here, task="sft:data_process", **strict)
    assert [*(tmp_path / "cache/shards").iterdir()] == shards
