"""Turn every exception into one line WHERE: WHAT with an exit code, and say what plugins
know of words that are not dstrain's: options, values and variables.
"""

import os
import re
import traceback
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

import click

from dstrain.cli.click_options import place
from dstrain.cli.completion import FAMILY
from dstrain.config import flags
from dstrain.config.options import GenerateConfig
from dstrain.errors import (
    SIMILAR,
    DstrainError,
    Interrupted,
    OutOfMemory,
    SystemFault,
    UsageError,
    nearest,
)
from dstrain.installed import how_to_have
from dstrain.registry import ModelFamily
from dstrain.training import is_out_of_memory
from dstrain.training.memory import LESS_MEMORY, SIGNS

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


DEFECT = (
    "this is a bug in dstrain or a plugin: please report it with the output of --debug",
)

OF_RUN = (
    "is required: the output folder of a training run",
    "to generate without one, name a model: --model_id, or --model with its files",
)
"""What is said where neither a run nor a model is named."""


def explain(error: BaseException) -> DstrainError:
    """Return any exception as an error of dstrain; an unforeseen one names its place in
    the code, and has exit code 1.
    """
    if isinstance(error, DstrainError):
        return error
    if isinstance(error, click.ClickException):
        return _usage(error)
    if isinstance(error, KeyboardInterrupt):
        advice = "run the same command again"
        return Interrupted("command", "interrupted", advice)
    if isinstance(error, OSError):
        return SystemFault(
            str(error.filename or "system"), error.strerror or str(error)
        )
    lines = str(error).strip().splitlines() or [""]
    if is_out_of_memory(error):
        # torch wraps a data loading process's error in its whole traceback.
        telling = [line for line in lines if any(sign in line for sign in SIGNS)]
        what = telling[0] if telling else lines[-1] or "the machine ran out of memory"
        return OutOfMemory("memory", what, *LESS_MEMORY)
    return _worker(lines) or _unforeseen(error, lines[0])


def _worker(lines: list[str]) -> DstrainError | None:
    """Explain the end of a data loading process: it was killed, or raised what torch
    passes on as a traceback.
    """
    if lines[0].startswith("DataLoader worker (pid"):
        return SystemFault(
            "data loader",
            lines[0],
            "a data loading process ended, possibly because memory ran out",
            "lower --dataset_num_workers",
        )
    if lines[0].startswith("Caught ") and "DataLoader worker process" in lines[0]:
        return DstrainError("data loader", lines[-1], *DEFECT)
    return None


def _unforeseen(error: BaseException, first_line: str) -> DstrainError:
    where = "dstrain"
    for frame in traceback.extract_tb(error.__traceback__)[-1:]:
        where = f"{frame.filename}:{frame.lineno}"
    what = f"{type(error).__name__}: {first_line}".rstrip(": ")
    return DstrainError(where, what, *DEFECT)


def _usage(error: click.ClickException) -> UsageError:
    if isinstance(error, click.NoSuchOption):
        return _no_such_option(error)
    what = _as_clause(error.message or error.format_message())
    if isinstance(error, click.BadOptionUsage):
        return UsageError(error.option_name, what)
    if what.startswith("got unexpected extra argument"):
        return _extra_argument(what, getattr(error, "ctx", None))
    param = getattr(error, "param", None)
    context = getattr(error, "ctx", None)
    if not isinstance(param, click.Option) or context is None:
        return UsageError("command line", what)
    if isinstance(error, click.MissingParameter):
        names = {one.name for one in context.command.params}
        if param.name == "model" and "run" in names:
            return UsageError("--run", *OF_RUN)
        what = f"is required: {_as_clause(str(param.help))}"
    return UsageError(place(param, context), what)


def _extra_argument(what: str, context: click.Context | None) -> UsageError:
    """Explain a word that no option takes: often another dataset after the first."""
    names = [one.name for one in context.command.params] if context else []
    if "dataset_base_path" not in names:
        return UsageError("command line", what)
    advice = "for several datasets, repeat --dataset_base_path for each folder"
    return UsageError("command line", what, advice)


def _as_clause(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].rstrip(".")


def _no_such_option(error: click.NoSuchOption) -> UsageError:
    known = ["--help"]
    if error.ctx is not None:
        for param in error.ctx.command.get_params(error.ctx):
            known += param.opts
    takes_family_flags = "--model_id" in known
    if takes_family_flags and error.ctx is not None:
        family: ModelFamily | None = error.ctx.meta.get(FAMILY)
        owners = _families_with(error.option_name.lstrip("-").replace("-", "_"))
        if owners and family is None:
            what = f"is a flag of {' and '.join(owners)}, and no model is named"
            return UsageError(error.option_name, what, "give --model or --model_id")
        if family is not None and owners and family.name not in owners:
            what = f"is a flag of {' and '.join(owners)}, not of {family.name}"
            return UsageError(error.option_name, what)
    what, *lines = no_such(error.option_name, known, error.ctx)
    is_misspelt = get_close_matches(error.option_name, known, cutoff=SIMILAR)
    is_without_family = error.ctx is not None and FAMILY not in error.ctx.meta
    may_be_a_familys = takes_family_flags and is_without_family
    if may_be_a_familys and not lines and not is_misspelt:
        lines = ["a family's own flags need --model or --model_id"]
    return UsageError(error.option_name, what, *lines)


def _families_with(option: str) -> list[str]:
    """Return the installed families that have an option of this name."""
    # Imported once something is wrong, since they import pluggy.
    from dstrain.registry import usable_families

    families, _ = usable_families()
    return [
        family.name
        for family in families
        if any(one.name == option for one in family.options)
    ]
