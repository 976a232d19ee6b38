"""Make images or videos during training, of prompts with what is each preview's own:

a dog on a beach --w 768 --h 512 --d 42 --s 20 --l 4 --ss euler --n blurry

previews/step-000010-0.png  the first --preview_prompt after 10 optimizer steps
previews/prompts.json       step -> from there on, the prompts by number, with seed,
                            size and what else decides them
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.plugin import (
    DstrainError,
    Images,
    Observer,
    PromptRow,
    RunFiles,
    UsageError,
    WatchedRun,
    get_logger,
    progress_bar,
    remove_leftovers,
    save_image_or_video,
    write_json,
)

from dstrain_watch.options import FLAG, PREVIEWS, WatchOptions

logger = get_logger("dstrain.watch")
MARKS: MappingProxyType[str, tuple[str, Callable[[str], Any]]] = MappingProxyType(
    {
        "w": ("width", int),
        "h": ("height", int),
        "d": ("seed", int),
        "s": ("num_inference_steps", int),
        "l": ("guidance_scale", float),
        "n": ("negative_prompt", str),
        "ss": ("sampler", str.strip),
    }
)
"""Mark -> the argument of inference, and how its value is read."""
LEAST = {"w": 1, "h": 1, "d": 0, "s": 1, "l": 0}
"""The least value of each mark that is a number, as `dstrain generate` has it."""
MOST = {"d": 2**63 - 1, "l": sys.float_info.max}
MARK = re.compile(rf"\s--({'|'.join(MARKS)})\s+")
OTHER = re.compile(r"(?:^|\s)(--[a-z]\w*)(?=[\s=]|$)", re.IGNORECASE)


def prompt_row(text: str) -> PromptRow:
    """Return the row of one --preview_prompt; raises UsageError for what is none."""
    if "." in text and os.path.isfile(text):
        raise UsageError(FLAG, f"{text} is a file; give each of its lines as a prompt")
    prompt, *rest = MARK.split(text)
    for part in (prompt, *rest[1::2]):
        if other := OTHER.search(part):
            what = f"{text!r}: {other[1]} is none of --{', --'.join(MARKS)} VALUE behind a text"
            raise UsageError(FLAG, what)
    arguments: dict[str, Any] = {}
    for mark, value in zip(rest[::2], rest[1::2], strict=True):
        name, read = MARKS[mark]
        try:
            arguments[name] = read(value.strip())
        except ValueError:
            what = f"{text!r}: --{mark} is {value.strip()!r}, not a number"
            raise UsageError(FLAG, what) from None
        found = arguments[name]
        least, most = LEAST.get(mark, found), MOST.get(mark, found)
        if not least <= found <= most:
            upto = f" to {most}" if mark == "d" else " or more"
            what = f"{text!r}: --{mark} is {value.strip()}, expected a finite number, {least}{upto}"
            raise UsageError(FLAG, what)
    return PromptRow(FLAG, text, prompt.strip() if rest else text, arguments)


class Stopped(Exception):
    """A preview is cut short, since the run is to stop."""


class Previews(Observer):
    """Makes previews, while the other processes wait: every so many steps, else with each
    save, before training where that is asked for, and when a run is resumed those that it
    lacks.
    """

    everywhere = True

    def __init__(self, images: Images, every: int | None, at_start: bool) -> None:
        """Make those of the rows that `dstrain_rows` has given."""
        self.every = every
        self.at_start = at_start
        self.numbers = [
            number for number, row in enumerate(images.rows) if row.option == FLAG
        ]

    def start(self, run: WatchedRun) -> None:
        """Make those due at the start."""
        if run.step or self.at_start:
            self._make_if_due(run, with_save=True)

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Make those due after a step."""
        if self.every:
            self._make_if_due(run)

    def saved(self, run: WatchedRun, files: Sequence[Path]) -> None:
        """Make those due with a save."""
        if not self.every:
            self._make_if_due(run, with_save=True)

    def _make_if_due(self, run: WatchedRun, with_save: bool = False) -> None:
        is_due = run.step % self.every == 0 if self.every else with_save
        if not is_due:
            return
        if run.is_main and not run.is_stopping():
            try:
                with run.weights_to_use():
                    self._make(run)
            # Or the other processes would wait for one whose previews are disabled.
            except Exception as error:
                logger.warning(f"no previews at step {run.step}: {_reason(error)}")
        run.wait()

    def _make(self, run: WatchedRun) -> None:
        """Make the previews of this step that are not there."""
        images, output = run.images, run.folder
        if images is None or output is None:
            return
        suffix = "mp4" if images.setup.spec.makes_video else "png"
        missing: dict[str, tuple[int, int]] = {}
        try:
            self._record(images, output, run.step)
            for place, number in enumerate(self.numbers):
                name = f"{PREVIEWS}/step-{run.step:06}-{place}.{suffix}"
                if not (output / name).exists():
                    missing[name] = place, number
            RunFiles.read(output).add(missing, run.step)
        except (OSError, DstrainError) as error:
            logger.warning(f"no previews in {output / PREVIEWS}: {_reason(error)}")
            return

        def on_step(index: int, latents: Any) -> None:
            bar.update()
            if run.is_stopping():
                raise Stopped

        steps = sum(images.steps(number) for _, number in missing.values())
        bar = progress_bar("preview", steps, brief=True)
        with images.making(), bar:
            for name, (place, number) in missing.items():
                path = output / name
                try:
                    preview = images.make(number, on_step)
                    save_image_or_video(preview, path)
                    logger.info(f"preview {path}")
                    run.report({f"preview/{place}": preview})
                except Stopped:
                    return
                # Whatever it is, it is no reason to lose the training.
                except Exception as error:
                    logger.warning(f"no preview {path}: {_reason(error)}")

    def _record(self, images: Images, output: Path, step: int) -> None:
        """Record what each number stands for from this step on; if that is new, remove
        what was made and recorded from there on.
        """
        path = output / WatchOptions.prompts
        files = RunFiles.read(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        try:
            record = json.loads(path.read_bytes())
            before = {int(first): prompts for first, prompts in record.items()}
        except (OSError, ValueError, AttributeError):
            before = {}
        now = {first: prompts for first, prompts in before.items() if first <= step}
        prompts = [images.facts(number) for number in self.numbers]
        if not now or now[max(now)] != prompts:
            now[step] = prompts
        if now == before:
            return
        outdated = [
            name
            for name, made_at in files.steps.items()
            if name.startswith(f"{PREVIEWS}/step-") and made_at >= step
        ]
        files.remove(outdated)
        files.add([WatchOptions.prompts])
        write_json(path, now)


def _reason(error: Exception) -> str:
    """Return what went wrong, in one line."""
    line = str(error).strip().partition("\n")[0]
    return line.removeprefix("dstrain: error: ") or "the cause has no message"
