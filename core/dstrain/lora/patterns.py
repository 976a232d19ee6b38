"""Find the number that --lora_rank or --lora_alpha gives to each layer.

A pattern is one or several dotted parts of a layer's name, the last of which may be cut
short: `attn` matches `blocks.0.attn.to_q` and `blocks.0.attn1.to_q`, and `ff.net`
matches `blocks.0.ff.net.2`. A number is always whole: `blocks.1` does not match
`blocks.12.attn.to_q`. `*` stands for anything. A name that the family gives some of its
layers, as targets do, stands for those.
"""

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from dstrain.errors import UsageError, first_few, nearest

Number = TypeVar("Number", int, float)


def is_target(layer: str, pattern: str) -> bool:
    """Return whether a pattern of --lora_target_modules matches a layer: its name is the
    pattern or ends with '.' + pattern; `*` stands for anything.
    """
    return fnmatch.fnmatchcase(f".{layer}", f"*.{pattern}")


def matches(layer: str, pattern: str) -> bool:
    """Return whether a pattern of --lora_rank matches a layer."""
    ending = ".*" if pattern[-1].isdigit() else "*"
    return fnmatch.fnmatchcase(f".{layer}.", f"*.{pattern}{ending}")


def numbers_of_layers(
    flag: str,
    layers: Collection[str],
    numbers: Sequence[tuple[str, Number]],
    aliases: Mapping[str, tuple[str, ...]],
) -> dict[str, Number]:
    """Return the numbers of the layers that a pattern matches, of several that of the
    last.

    Raises UsageError for a pattern that no layer gets its number from.

    Args:
        flag: The option that the patterns are from.
        layers: The names of the layers with LoRA.
        numbers: The patterns with their numbers.
        aliases: Other names of layers, each with the targets it stands for.
    """
    found: dict[str, Number] = {}
    origins: dict[str, str] = {}
    for pattern, number in numbers:
        own = _matched(pattern, layers, aliases)
        if not own:
            known = set(aliases)
            for layer in layers:
                known.update(part for part in layer.split(".") if not part.isdigit())
            what = f"{pattern!r} matches no layer with LoRA{nearest(pattern, known)}"
            raise UsageError(flag, what, f"they are: {first_few(layers)}")
        found |= dict.fromkeys(own, number)
        origins |= dict.fromkeys(own, pattern)
    for pattern, _ in numbers:
        if pattern not in origins.values():
            what = f"{pattern!r} has no effect: later patterns match all of its layers"
            raise UsageError(flag, what, "put the more general pattern first")
    return found


def exact_pattern(names: Collection[str]) -> str:
    """Return the regular expression with which peft finds exactly these layers.

    One for all of them: peft tries each of its patterns on each layer.
    """
    # Without `^`, peft would also match layers whose names end with one of these.
    return f"^(?:{'|'.join(map(re.escape, names))})"


def _matched(
    pattern: str, layers: Collection[str], aliases: Mapping[str, tuple[str, ...]]
) -> list[str]:
    targets = aliases.get(pattern)
    if targets is None:
        return [layer for layer in layers if matches(layer, pattern)]
    return [
        layer for layer in layers if any(is_target(layer, target) for target in targets)
    ]
