"""The command at the end of a run can be typed as it is: it has a prompt, the size, the
number of steps and the inputs that were trained.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain.plugin import Column

from tests.support import family
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


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((16, 24), ("16", "24")),
        # As by default.
        ((16, 16), (None, None)),
        # Of two sizes, neither is the one.
        ((None, None), (None, None)),
    ],
)
def test_it_has_the_size_of_the_run(
    trial: Trial,
    size: tuple[int | None, int | None],
    wanted: tuple[str | None, str | None],
) -> None:
    height, width = size
    found = trial(height=height, width=width)
    assert (found.get("height"), found.get("width")) == wanted


@pytest.mark.parametrize(
    ("column", "cell", "flags", "said", "said_in_stage_2"),
    [
        (Column("extra", "image"), "0.png", {}, "extra=FILE", "extra=FILE"),
        (
            Column("extra", "image", optional=True),
            "0.png",
            {"extra_inputs": "extra"},
            "extra=FILE",
            "extra=FILE",
        ),
        (Column("extra", "image", optional=True), "0.png", {}, None, None),
        (Column("extra"), "happy", {}, "extra=happy", "extra=VALUE"),
        (Column("extra", "texts"), ["calm", "sad"], {}, "extra=calm", "extra=VALUE"),
        (Column("extra", "integer"), 4, {}, "extra=4", None),
        (Column("extra", "integer"), 7, {}, None, None),
    ],
)
def test_it_has_the_inputs_that_inference_needs(
    column: Column,
    cell: Any,
    flags: dict[str, Any],
    said: str | None,
    said_in_stage_2: str | None,
    tmp_path: Path,
    trial: Trial,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files, values of the first row, and those that have another default, here 7."""

    def encode_prompt(
        prompt: str, extra: Any = None, *, text_encoder: Any, tokenizer: Any
    ) -> family.Prompt:
        return family.encode_prompt(
            prompt, text_encoder=text_encoder, tokenizer=tokenizer
        )

    defaults = {"extra": 7} if column.kind == "integer" else {}
    spec = replace(
        family.BASE,
        units=(encode_prompt, family.encode_image),
        inputs={**family.BASE.inputs, "extra": column},
        defaults={**family.BASE.defaults, **defaults},
    )
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    change_rows(tmp_path, {"extra": cell})
    flags = {"variant": "base", **flags}
    assert trial(**flags).get("input") == said
    cache = {"feature_cache": tmp_path / "cache"}
    assert trial(**flags, **cache).get("input") == said_in_stage_2
