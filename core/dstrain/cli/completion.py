"""Complete command lines in a shell, by click's own script."""

import os
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr

import click
from click.shell_completion import CompletionItem, shell_complete

PROGRAM = "dstrain"
VARIABLE = "_DSTRAIN_COMPLETE"
"""The variable by which a shell asks for completions; its value is click's."""
FAMILY = "dstrain.family"
"""Key of `Context.meta` for the family that --model names, or --model_id tells."""

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]


def answer(group: click.Group, instruction: str) -> int:
    """Print what a shell asked for by `VARIABLE`: its script, or completions, and
    nothing else, whatever fails: it would stand in the middle of what is typed.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        try:
            return shell_complete(group, {}, PROGRAM, VARIABLE, instruction)
        except (Exception, SystemExit):
            return 1


def one_of(values: Iterable[str]) -> Completer:
    """Return the completer of an option with these values."""
    known = [(value, "") for value in values]
    return completing(lambda typed: known)


def families(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the name of a family, by the metadata of what is installed."""
    from dstrain.installed import installed

    found = {one.name: f"{one.distribution} {one.version}" for one in installed()}
    return completing(lambda typed: found.items())(ctx, param, incomplete)


def completing(values: Callable[[str], Iterable[tuple[str, str]]]) -> Completer:
    """Return the completer of the values that a function knows for what is typed, each
    with what it is; it is asked when something is completed.
    """

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        typed = incomplete.casefold().replace("_", "-")
        return [
            CompletionItem(value, help=help or None)
            for value, help in values(incomplete)
            if value.casefold().replace("_", "-").startswith(typed)
        ]

    return complete


def folded(incomplete: str) -> str:
    """Return an option, or the beginning of one, in dstrain's own spelling."""
    name, equals, value = incomplete.partition("=")
    body = name.lstrip("-")
    return name[: len(name) - len(body)] + body.replace("-", "_") + equals + value
