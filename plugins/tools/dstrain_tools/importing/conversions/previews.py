"""Conversions of the images and videos that are generated during a run."""

import json
import re
from pathlib import Path
from typing import Any

from dstrain_tools.importing.context import Context, as_list
from dstrain_tools.importing.entries import Result
from dstrain_tools.importing.reading.data_files import read_data


def preview_steps(option: str, value: Any, context: Context) -> Result:
    """Count the steps between previews, where there are any."""
    if context.is_on("train.disable_sampling"):
        return Result(note="previews are switched off")
    prompts_of_run = context.value("sample_prompts") or context.value("sample.prompts")
    if not (prompts_of_run or context.value("sample.samples")):
        return Result(note="there are no prompts to make previews of")
    if not value:
        return Result(note="is off")
    return Result({option: value})


def preview_epochs(option: str, value: Any, context: Context) -> Result:
    """Make previews whenever weights are saved, which is the default."""
    saved = context.value("save_every_n_epochs", 1)
    if str(value) == str(saved) or not context.value("sample_prompts"):
        return Result(note="previews are made whenever weights are saved")
    return Result(
        lost="previews are made whenever weights are saved, or every --preview_steps N steps"
    )


def prompts(option: str, value: Any, context: Context) -> Result:
    """Give the prompts of previews, without what stands behind them."""
    if context.is_on("train.disable_sampling"):
        return Result(note="previews are switched off")
    texts = [
        one.get("prompt") if isinstance(one, dict) else one for one in as_list(value)
    ]
    return _previews(option, [str(text) for text in texts if text])


def prompt_file(option: str, value: Any, context: Context) -> Result:
    """Give the prompts of a file, without what stands behind them."""
    path = Path(str(value))
    places = [path, *(file.parent / path for file in context.source.files)]
    found = [place for place in places if place.is_file()]
    if not found:
        return Result(
            lost=f"{path} is not here; give each prompt with --preview_prompt TEXT"
        )
    if found[0].suffix in (".toml", ".json"):
        return _previews(option, _prompts_of_table(found[0]))
    lines = found[0].read_text("utf-8-sig").splitlines()
    return _previews(option, [one for one in lines if one.strip() and one[:1] != "#"])


def _prompts_of_table(path: Path) -> list[str]:
    if path.suffix == ".json":
        rows = json.loads(path.read_text("utf-8"))
    else:
        data = read_data(path).get("prompt", {})
        rows = data.get("subset", [data]) if isinstance(data, dict) else data
    return [str(row["prompt"]) for row in rows if "prompt" in row]


def _previews(option: str, texts: list[str]) -> Result:
    """Return prompts without flags; these have no counterpart."""
    # The flags of a prompt follow it: `a dog --w 512 --s 20`.
    bare = [re.split(r"\s+--(?=[a-z])", text, maxsplit=1)[0].strip() for text in texts]
    if not any(bare):
        return Result(note="has no prompts")
    note = ""
    if bare != [text.strip() for text in texts]:
        note = "sizes, seeds and images of previews are the variant's defaults"
    return Result({option: [one for one in bare if one]}, note)
