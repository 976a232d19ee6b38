"""Run the command line: `dstrain`, or `python -m dstrain`."""

import os
import sys
import traceback
from collections.abc import Sequence

import click

from dstrain.cli.commands import commands
from dstrain.cli.errors import explain
from dstrain.cli.options import disabled_plugin, shared_options
from dstrain.console import get_logger, logging_to_stderr, redacted
from dstrain.errors import SystemFault, UsageError, nearest

logger = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (sys.argv's without `argv`) and return the exit code; errors
    are printed, never raised.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    caught: BaseException | None = None
    try:
        with logging_to_stderr():
            _run(words)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (Exception, KeyboardInterrupt) as error:
        caught = error
    lost = _lost_output(caught)
    if lost is not None:
        if isinstance(lost, BrokenPipeError):
            return 0  # a reader such as `head` has read enough
        caught = SystemFault("standard output", str(lost.strerror))
    return 0 if caught is None else _report(caught, "--debug" in words)


def _report(error: BaseException, debug: bool) -> int:
    """Print an error without its secrets, and return its exit code."""
    from dstrain.distributed.liveness import ignore_sigterm, should_report

    ignore_sigterm()
    failure = explain(error)
    try:
        if should_report(failure):
            click.echo(redacted(str(failure)), err=True)
        if debug:
            click.echo(redacted("".join(traceback.format_exception(error))), err=True)
    except OSError:
        pass  # standard error is closed
    return failure.exit_code


def _lost_output(caught: BaseException | None) -> OSError | None:
    """Flush standard output; if that fails, or failed in click.echo, return why."""
    lost = None
    if isinstance(caught, OSError):
        last_frame = traceback.extract_tb(caught.__traceback__)[-1]
        lost = caught if last_frame.name == click.echo.__name__ else None
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        lost = lost or error
    if lost is not None:
        # Python flushes again when it ends, and would print an error of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return lost if caught is None or lost is caught else None


def command_group() -> click.Group:
    """Return the group of dstrain's own commands; '-' in option names is read as '_'."""
    group = click.Group(
        "dstrain",
        commands=commands(),
        params=[*shared_options()],
        help="Train diffusion models, and generate with them.\n\n"
        "`dstrain --model FAMILY ...` is short for `dstrain train --model FAMILY ...`.",
        context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
    )
    version = click.version_option(package_name="core", message="dstrain %(version)s")
    return version(group)


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


def _run_plugin_command(
    words: Sequence[str], shared: Sequence[str], own: Sequence[str]
) -> None:
    """Run a command that a plugin adds; plugins are imported only for such a word."""
    from dstrain.registry.hooks import load_extensions

    names = [word for word in shared if word not in ("--debug", "-p")]
    extensions = load_extensions([disabled_plugin(name) for name in names])
    offers, broken = extensions.offered("dstrain_commands", click.Command, own)
    for reason in (*extensions.broken, *broken):
        logger.warning(reason)
    command = offers.get(words[0])
    if command is None:
        known = [*own, *offers]
        what = f"no command named {words[0]!r}; commands: {', '.join(known)}"
        raise UsageError("command line", what + nearest(words[0], known))
    with command.make_context(f"dstrain {words[0]}", list(words[1:])) as context:
        command.invoke(context)
