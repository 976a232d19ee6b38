"""The command line: `dstrain`, `python -m dstrain`. Its help imports neither torch nor a plugin."""

import sys
import traceback
from collections.abc import Sequence

import click

from dstrain.cli.commands import commands
from dstrain.cli.failures import explain
from dstrain.cli.options import LeftOut, shared_options
from dstrain.errors import UsageError, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (sys.argv's without `argv`) and return the exit code; errors are printed, never raised."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _run(words)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (Exception, KeyboardInterrupt) as error:
        failure = explain(error)
        click.echo(str(failure), err=True)
        if "--debug" in words:
            traceback.print_exception(error)
        return failure.exit_code
    return 0


def command_group() -> click.Group:
    """The group of dstrain's own commands; option names are read with '-' as '_', values as they are."""
    version = click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_version,
        help="Show the version and exit.",
    )
    return click.Group(
        "dstrain",
        commands=commands(),
        params=[version, *shared_options()],
        help="Train diffusion models from the code that runs them.\n\n"
        "`dstrain --model FAMILY ...` is `dstrain train --model FAMILY ...`.",
        context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
    )


def _version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"dstrain {version('core')}")
        context.exit()


def _run(words: Sequence[str]) -> None:
    group = command_group()
    shared, rest = _split(words)
    if not rest or rest[0] in ("--help", "--version"):
        rest = rest[:1] or ["--help"]
    elif rest[0].startswith("-"):
        rest = ["train", *shared, *rest]
    elif rest[0] in group.commands:
        rest = [rest[0], *shared, *rest[1:]]
    else:
        _run_plugin_command(rest, shared, tuple(group.commands))
        return
    with group.make_context("dstrain", rest) as context:
        group.invoke(context)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the shared options that stand before the command."""
    at = 0
    while at < len(words) and words[at] in ("--debug", "-p"):
        at += 2 if words[at] == "-p" else 1
    return list(words[:at]), list(words[at:])


def _run_plugin_command(words: Sequence[str], shared: Sequence[str], own: Sequence[str]) -> None:
    """Run a command that a plugin adds; plugins are asked only for a first word that is no command of dstrain's own."""
    from dstrain.hooks import load_extensions

    names = [word for word in shared if word not in ("--debug", "-p")]
    extensions = load_extensions([LeftOut().convert(name, None, None) for name in names])
    for reason in extensions.broken:
        click.echo(f"dstrain: warning: {reason}", err=True)
    found = {command.name: command for answer in extensions.hook.dstrain_commands() for command in answer}
    command = found.get(words[0])
    if command is None:
        known = [*own, *(str(name) for name in found)]
        hint = nearest(words[0], known)
        raise UsageError("command line", f"no command named {words[0]!r}; commands: {', '.join(known)}{hint}")
    with command.make_context(f"dstrain {words[0]}", list(words[1:])) as context:
        command.invoke(context)
