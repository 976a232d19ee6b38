"""The command at the end of a run has a prompt of the run."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")
Trial = Callable[..., dict[str, str]]


@pytest.fixture
def trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Trial:
    """Return a function from flags to the flags of the command that a run prints, after
    both of its stages if it has a feature cache.
    """
    project(tmp_path)
    runs = iter(range(9))

    def command(**flags: Any) -> dict[str, str]:
        capsys.readouterr()
        given = {"output_path": tmp_path / f"out {next(runs)}", **flags}
        train(tmp_path, max_steps=1, **given)
        lines = capsys.readouterr().err.splitlines()
        (line,) = (line for line in lines if line.startswith("try them: "))
        words = shlex.split(line.removeprefix("try them: "))
        assert words[:2] == ["dstrain", "generate"]
        names = [name.removeprefix("--") for name in words[2::2]]
        found = dict(zip(names, words[3::2], strict=True))
        assert found["run"] == str(given["output_path"])
        return found

    return command


def change_rows(folder: Path, *changes: dict[str, Any]) -> None:
    """Change the first rows, and drop the others."""
    table = folder / "data/metadata.json"
    rows = json.loads(table.read_text())
    changed = [row | change for row, change in zip(rows, changes, strict=False)]
    table.write_text(json.dumps(changed))


@pytest.mark.parametrize("is_split", [False, True])
def test_it_has_the_first_caption_that_is_not_blank(
    is_split: bool, tmp_path: Path, trial: Trial
) -> None:
    captions = (" ", 'a dog\'s "bed"\n on $HOME', "cat")
    change_rows(tmp_path, *({"prompt": caption} for caption in captions))
    flags: dict[str, Any] = {}
    if is_split:
        cache = {"feature_cache": tmp_path / "cache"}
        train(tmp_path, task="sft:data_process", **cache)
        flags = {"task": "sft:train", "dataset_base_path": None, **cache}
    assert trial(**flags)["prompt"] == 'a dog\'s "bed" on $HOME'


@pytest.mark.parametrize(
    "caption",
    ["a first  second\nthird's b", f"{'word ' * 18}first  second\nthird's"],
    ids=["whole", "cut"],
)
def test_a_secret_in_a_caption_is_not_in_it(
    caption: str, tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "first  second\nthird's")
    change_rows(tmp_path, {"prompt": caption})
    prompt = trial()["prompt"]
    assert "***" in prompt
    assert not {"first", "second", "third's"} & set(prompt.split())


def test_a_previews_prompt_goes_before_it_with_the_trigger_word_cut_between_words(
    tmp_path: Path, trial: Trial
) -> None:
    prompts = ("a [trigger] dog " + "word " * 40, "cat")
    flags: dict[str, Any] = {"preview_prompt": prompts, "trigger_word": "sks"}
    cache = {"feature_cache": tmp_path / "cache"}
    wanted = " ".join(["a sks dog", *["word"] * 18])
    for stages in ({}, cache, {**cache, "task": "sft:train"}):
        assert trial(**flags, **stages)["prompt"] == wanted
    # The run's word, else that of the first dataset with one of its own.
    one = {"dataset_base_path": str(tmp_path / "data")}
    for of_run, own in ((None, ("sks", "tok")), ("sks", ("tok",))):
        entries = tuple(json.dumps({**one, "trigger_word": word}) for word in own)
        given = {"trigger_word": of_run, "dataset": entries, "dataset_base_path": None}
        assert trial(**flags | given)["prompt"] == wanted
    # The prompts of the feature cache are previewed, too.
    found = trial(task="sft:train", trigger_word="sks", **cache)
    assert found["prompt"] == wanted
