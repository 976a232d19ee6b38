"""Run the command line: `dstrain`, or `python -m dstrain`."""

import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper

import click

from dstrain.cli.click_options import disabled_plugin, shared_options
from dstrain.cli.commands import commands
from dstrain.cli.errors import explain
from dstrain.console import get_logger, logging_to_stderr, printable, redacted
from dstrain.errors import SystemFault, UsageError, nearest

logger = get_logger(__name__)
CONFIG_SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (sys.argv's without `argv`) and return the exit code; errors
    are printed, never raised.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    if isinstance(sys.stdout, TextIOWrapper):
        # Into a file or a pipe, Windows writes in an encoding that lacks most letters.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with logging_to_stderr():
            _run(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except OSError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if frame.name not in (click.echo.__name__, main.__name__):
            return _report(error, debug)
        # Standard output is lost. Python flushes it again when it ends, and would print
        # an error of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return _report(SystemFault("standard output", str(error.strerror)), debug)
        # A reader such as `head` has read enough.
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, debug)
    return 0


def _report(error: BaseException, debug: bool) -> int:
    """Print an error without its secrets, and return its exit code."""
    from dstrain.distributed.liveness import ignore_sigterm, should_report

    ignore_sigterm()
    failure = explain(error)
    try:
        if should_report(failure):
            click.echo(printable(redacted(str(failure))), err=True)
        if debug:
            click.echo(redacted("".join(traceback.format_exception(error))), err=True)
    except OSError:
        pass  # standard error is closed
    return failure.exit_code


def command_group() -> click.Group:
    """Return the group of dstrain's own commands; '-' in option names is read as '_'."""
    group = click.Group(
        "dstrain",
        commands=commands(),
        params=[*shared_options()],
        help="Train diffusion models and generate images and videos with them.\n\n"
        "`dstrain --model FAMILY ...` is short for `dstrain train --model FAMILY ...`.",
        context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
    )
    version = click.version_option(package_name="core", message="dstrain %(version)s")
    return version(group)


def _run(words: Sequence[str]) -> None:
    group = command_group()
    # Options that every command has may stand before it.
    count = 0
    while count < len(words) and words[count] in ("--debug", "-p"):
        count += 2 if words[count] == "-p" else 1
    shared = words[:count]
    rest = words[count:]
    first = rest[0] if rest else "--help"
    if first in ("--help", "--version"):
        words = [first]
    elif first.startswith("-"):
        words = ["train", *words]
    elif first in group.commands:
        words = [first, *shared, *rest[1:]]
    else:
        _run_plugin_command(rest, shared, tuple(group.commands))
        return
    with group.make_context("dstrain", list(words)) as context:
        group.invoke(context)


def _run_plugin_command(
    words: Sequence[str],
    shared: Sequence[str],
    own: Sequence[str],
) -> None:
    """Run a command that a plugin adds; plugins are imported only for such a word."""
    from dstrain.registry.hooks import load_extensions

    names = [word for word in shared if word not in ("--debug", "-p")]
    extensions = load_extensions([disabled_plugin(name) for name in names])
    offers = extensions.offered("dstrain_commands", click.Command, own)
    for reason in extensions.broken:
        logger.warning(reason)
    command = offers.get(words[0])
    if command is None:
        known = [*own, *offers]
        if words[0].endswith(CONFIG_SUFFIXES):
            what = f"no command named {words[0]!r}; for a file of options"
            raise UsageError("command line", f"{what} use --config {words[0]}")
        what = f"no command named {words[0]!r}; commands: {', '.join(known)}"
        raise UsageError("command line", what + nearest(words[0], known))
    with command.make_context(f"dstrain {words[0]}", list(words[1:])) as context:
        command.invoke(context)
