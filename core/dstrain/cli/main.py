"""Run the command line: `dstrain`, or `python -m dstrain`."""

import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper

import click

from dstrain.cli.click_options import shared_options
from dstrain.cli.commands import commands
from dstrain.cli.completion import PROGRAM, VARIABLE, answer
from dstrain.cli.errors import explain
from dstrain.cli.help import HELP
from dstrain.cli.root_group import RootGroup
from dstrain.console import has_color, logging_to_stderr, marked, printable, redacted
from dstrain.errors import SystemFault
from dstrain.lazy import own_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (sys.argv's without `argv`) and return the exit code; errors
    are printed, never raised.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    if instruction := os.environ.get(VARIABLE):
        return answer(command_group(), instruction)
    if isinstance(sys.stdout, TextIOWrapper):
        # Into a file or a pipe, Windows writes in an encoding that lacks most letters.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with logging_to_stderr(), own_process():
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
    from dstrain.distributed import ignore_sigterm, should_report

    ignore_sigterm()
    failure = explain(error)
    try:
        if should_report(failure):
            text = printable(redacted(str(failure)))
            click.echo(marked(text, sys.stderr), err=True, color=has_color(sys.stderr))
        if debug:
            click.echo(redacted("".join(traceback.format_exception(error))), err=True)
    except OSError:
        pass  # standard error is closed
    return failure.exit_code


def command_group() -> click.Group:
    """Return the group of dstrain's own commands; '-' in option names is read as '_'."""
    group = RootGroup(
        PROGRAM,
        commands=commands(),
        params=[*shared_options()],
        help="Train diffusion models and generate images and videos with them.\n\n"
        "`dstrain --model FAMILY ...` is short for `dstrain train --model FAMILY ...`.\n\n"
        "\b\n"
        "dstrain train -h   the options that most users need\n"
        "dstrain models     the models that can be trained\n"
        "dstrain plugins    what plugins add\n",
        context_settings={
            "token_normalize_func": lambda name: name.replace("-", "_"),
            "help_option_names": list(HELP),
            "color": has_color(sys.stdout),
        },
    )
    version = click.version_option(package_name="core", message="dstrain %(version)s")
    return version(group)


def _run(words: Sequence[str]) -> None:
    group = command_group()
    with group.make_context(PROGRAM, list(words)) as context:
        group.invoke(context)
