"""Read the prompts of previews: a text, and behind it what is this preview's own.

a dog on a beach --w 768 --h 512 --d 42 --s 20 --l 4 --n blurry
"""

import re
import sys
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from dstrain.plugin import PromptRow, UsageError

from dstrain_watch.options import FLAG

MARKS: MappingProxyType[str, tuple[str, Callable[[str], Any]]] = MappingProxyType(
    {
        "w": ("width", int),
        "h": ("height", int),
        "d": ("seed", int),
        "s": ("num_inference_steps", int),
        "l": ("guidance_scale", float),
        "n": ("negative_prompt", str),
    }
)
"""Mark -> the argument of inference, and how its value is read."""
LEAST = {"w": 1, "h": 1, "d": 0, "s": 1, "l": 0}
"""The least value of each mark that is a number, as `dstrain generate` has it."""
MOST = {"d": 2**63 - 1, "l": sys.float_info.max}
MARK = re.compile(rf"\s--([{''.join(MARKS)}])\s+")


def prompt_row(text: str) -> PromptRow:
    """Return the row of one --preview_prompt; raises UsageError for a value that is none."""
    prompt, *rest = MARK.split(text)
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
    if ("width" in arguments) != ("height" in arguments):
        raise UsageError(FLAG, f"{text!r}: give --w and --h together")
    return PromptRow(FLAG, text, prompt.strip() if rest else text, arguments)
