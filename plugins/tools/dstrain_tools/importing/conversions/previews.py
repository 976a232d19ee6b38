"""Conversions of the images and videos that are generated during a run."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain_tools.importing.context import Context, as_list, as_whole_number
from dstrain_tools.importing.conversions.datasets.frames import reads_videos
from dstrain_tools.importing.entries import Result
from dstrain_tools.importing.reading.data_files import read_data

SETTINGS = "a preview has its own size, seed, steps, guidance, sampler (euler), negative prompt only"
SAMPLER = (
    "previews are made by the sampler of the model, or by --ss NAME behind a prompt"
)
OWN_SAMPLER = "flowmatch"
"""The sampler of ai-toolkit that is the models' own."""
VIDEO_SETTINGS = ("sample.num_frames", "sample.fps")
PROMPTS = ("sample_prompts", "sample.prompts", "sample.samples")
LARGE_STEPS_OF, LARGE_STEP = "ti2v-5b", 32
"""The variant whose sides are multiples of more than 16 pixels, and of how many."""
EMBEDDED = ("flux2", "dev")
"""The variant of FLUX.2 whose guidance is embedded, as FLUX's is."""
SCALE_FROM_ZERO = "z_image"
"""The family whose scale of guidance is 1 less than that of those tools."""
TRIGGER = "[trigger]"
"""What stands in prompts of ai-toolkit for its trigger word."""
MARKS = {
    "w": (r"[1-9]\d*", ("width",)),
    "h": (r"[1-9]\d*", ("height",)),
    "d": (r"\d{1,18}", ("seed",)),
    "s": (r"[1-9]\d*", ("sample_steps",)),
    "l": (r"\d+(\.\d+)?", ("scale", "cfg_scale", "guidance_scale")),
    # Of the samplers' names there, only this one is a sampler's here.
    "ss": ("euler", ("sample_sampler",)),
    "n": (r"((?!--).)+", ("neg", "negative_prompt")),
}
"""What may follow a prompt here: its mark -> its values, and its names in tables."""


def preview_setting(option: str, value: Any, context: Context) -> Result:
    """Say that previews have no settings, where a configuration makes some."""
    reason = _without_previews(context)
    if reason or value in (None, "", False):
        return Result(note=reason or "is off")
    if context.key.removeprefix("sample.") in _names(context):
        return Result(note="follows each prompt")
    if context.key in VIDEO_SETTINGS and not reads_videos(context):
        return Result(note="affects only videos")
    if context.key != "sample.sampler":
        return Result(lost=SETTINGS)
    return Result(note=SAMPLER) if value == OWN_SAMPLER else Result(lost=SAMPLER)


def preview_steps(option: str, value: Any, context: Context) -> Result:
    """Count the steps between previews, where there are any."""
    reason = _without_previews(context)
    if reason or not as_whole_number(value or 0):
        return Result(note=reason or "is off")
    return Result({option: value})


def preview_epochs(option: str, value: Any, context: Context) -> Result:
    """Make previews whenever weights are saved: by default, after each epoch."""
    reason = _without_previews(context)
    if reason or as_whole_number(value or 0) <= 1:
        return Result(note=reason or "previews are made whenever weights are saved")
    return Result(
        lost="previews are made whenever weights are saved, or every --preview_steps N steps"
    )


def prompts(option: str, value: Any, context: Context) -> Result:
    """Give the prompts of previews, each with its settings and those of all."""
    if reason := _without_previews(context):
        return Result(note=reason)
    shared = {name: context.value(f"sample.{name}") for name in _names(context)}
    rows = [one if isinstance(one, dict) else {"prompt": one} for one in as_list(value)]
    rows = [{**shared, **row} for row in rows]
    entries = [context.given.get("trigger_word")]
    entries += [one for own in context.source.datasets for one in own]
    words = [one.value for one in entries if one and one.key == "trigger_word"]
    return _previews(option, rows, context, str(words[0] if words else TRIGGER))


def prompt_file(option: str, value: Any, context: Context) -> Result:
    """Give the prompts of a file, each with its settings."""
    path = Path(str(value))
    places = [path, *(file.parent / path for file in context.source.files)]
    found = [place for place in places if place.is_file()]
    if not found:
        return Result(
            lost=f"{path} is not here; give each prompt with --preview_prompt TEXT"
        )
    if found[0].suffix in (".toml", ".json"):
        return _previews(option, _prompts_of_table(found[0]), context)
    lines = found[0].read_text("utf-8-sig").splitlines()
    rows = [{"prompt": one} for one in lines if one[:1] != "#"]
    return _previews(option, rows, context)


def _without_previews(context: Context) -> str:
    """Return why a configuration makes no previews; '' if it does."""
    if context.is_on("train.disable_sampling"):
        return "previews are switched off"
    if not any(context.value(key) for key in PROMPTS):
        return "there are no prompts to make previews of"
    return ""


def _prompts_of_table(path: Path) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a file of prompts, with what holds for all of them."""
    if path.suffix == ".json":
        return _tables(json.loads(path.read_text("utf-8")))
    data = read_data(path).get("prompt", {})
    if not isinstance(data, dict):
        return _tables(data)
    shared = {key: value for key, value in data.items() if key != "subset"}
    return [{**shared, **row} for row in _tables(data.get("subset", [{}]))]


def _tables(rows: object) -> Sequence[Mapping[str, Any]]:
    """Return a list of tables; raises ValueError for anything else."""
    if isinstance(rows, list) and all(isinstance(one, Mapping) for one in rows):
        return rows
    raise ValueError("a list of tables, each with its prompt, is expected")


def _names(context: Context) -> dict[str, str]:
    """Return marks by names in tables, where FLUX's guidance is the embedded one."""
    names = {name: mark for mark, (_, keys) in MARKS.items() for name in keys}
    family, variant = context.model.family.name, context.model.variant
    if family == "flux" or (family, variant) == EMBEDDED:
        del names["guidance_scale"]
    return names


def _previews(
    option: str,
    rows: Sequence[Mapping[str, Any]],
    context: Context,
    word: str = TRIGGER,
) -> Result:
    """Return prompts, each followed by the settings that it may have here.

    Args:
        option: The option of prompts.
        rows: Each with its `prompt`, and perhaps settings.
        context: Where to look things up.
        word: What stands for `[trigger]`.
    """
    found = []
    is_lost = False
    names = _names(context)
    for row in rows:
        # Settings may follow a prompt: `a dog --w 512 --s 20`.
        text, *settings = re.split(
            r"(?:^|\s+)--(?=[A-Za-z])", str(row.get("prompt") or "")
        )
        if not text.strip():
            continue
        asked = {
            names.get(key, key): str(one).strip()
            for key, one in row.items()
            if key != "prompt" and one not in (None, "")
        }
        for setting in settings:
            mark, _, one = setting.partition(" ")
            asked[mark] = one.strip()
        own = {
            mark: asked[mark]
            for mark, (values, _) in MARKS.items()
            if mark in asked and re.fullmatch(values, asked[mark])
        }
        if context.model.family.name == SCALE_FROM_ZERO and "l" in own:
            own["l"] = f"{max(float(own['l']) - 1, 0):g}"
        sides = [own.pop(mark, "") for mark in "wh"]
        if all(sides):
            # What those tools would make.
            step = LARGE_STEP if context.model.variant == LARGE_STEPS_OF else 16
            own["w"], own["h"] = (
                str(max(step, int(one) // step * step)) for one in sides
            )
        is_lost = is_lost or own.keys() != asked.keys()
        marks = "".join(f" --{mark} {one}" for mark, one in own.items())
        found.append(text.strip().replace(TRIGGER, word) + marks)
    if not found:
        return Result(note="has no prompts")
    return Result({option: found}, lost=SETTINGS if is_lost else "")
