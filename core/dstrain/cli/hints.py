"""Say what plugins know of words that are not dstrain's: options, values and variables."""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

import click

from dstrain.config import flags
from dstrain.config.options import GenerateConfig
from dstrain.errors import SIMILAR, nearest
from dstrain.installed import how_to_have

FLAG = re.compile(r"--(\w+)")
ELSEWHERE = frozenset({"config_file"})
"""Options in hints that are accelerate's."""
DISABLED = "dstrain.disabled_plugins"
"""Key of `Context.meta` for the plugins that -p leaves out."""


def hints(word: str, ctx: click.Context | None) -> Iterator[str]:
    """Yield what plugins say of a word that is not dstrain's: `--NAME` for an option,
    `--NAME VALUE` for its value.
    """
    # Imported once something is wrong, since it imports pluggy.
    from dstrain.registry import load_extensions

    disabled = ctx.meta.get(DISABLED, ()) if ctx is not None else ()
    known = load_extensions(disabled).hints()
    return (text for pattern, text in known.items() if fnmatchcase(word, pattern))


def no_such(
    name: str, known: Iterable[str], ctx: click.Context | None
) -> tuple[str, ...]:
    """Return the lines of an error about an unknown option: a hint, if the options that
    it names are known here, or the nearest name.
    """
    known = list(known)
    names_here = {one.lstrip("-") for one in known} | ELSEWHERE
    flag = name.lstrip("-").replace("-", "_")
    if advice := how_to_have("options", flag):
        return "no such option is installed", advice
    for line in hints(f"--{flag}", ctx):
        if names_here.issuperset(FLAG.findall(line)):
            return "no such option", line
    hint = nearest(name, known, SIMILAR)
    if not hint and flag in {one.name for one in flags(GenerateConfig)}:
        return "no such option", "it is an option of `dstrain generate`"
    return (f"no such option{hint}",)


def variables_without_effect(disabled_plugins: Collection[str]) -> Iterator[str]:
    """Yield a line for each variable that is set and of which a plugin says, by `$NAME`,
    why it has no effect.
    """
    from dstrain.registry import load_extensions

    for word, why in load_extensions(disabled_plugins).hints().items():
        if word.startswith("$") and os.environ.get(word[1:]):
            yield f"variable {word[1:]} has no effect: {why}"
