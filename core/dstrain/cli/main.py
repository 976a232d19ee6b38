"""Run the command line: `dstrain`, or `python -m dstrain`."""

import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper

import click
from click.shell_completion import CompletionItem

from dstrain.cli.click_options import shared_options
from dstrain.cli.commands import commands
from dstrain.cli.completion import PROGRAM, VARIABLE, answer, folded
from dstrain.cli.errors import explain
from dstrain.cli.help import HELP
from dstrain.cli.plugin_commands import OpenGroup
from dstrain.console import has_color, logging_to_stderr, marked, printable, redacted
from dstrain.errors import SystemFault, UsageError
from dstrain.lazy import own_process

CONFIG_SUFFIXES = (".toml", ".yaml", ".yml", ".json")


class RootGroup(OpenGroup):
    """The command `dstrain`: without the name of a command, an option means `train`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the name of the command first; options that every command has may stand
        before it.
        """
        count = 0
        while count < len(args) and args[count] in ("--debug", "-p"):
            count += 2 if args[count] == "-p" else 1
        shared = args[:count]
        rest = args[count:]
        first = rest[0] if rest else ""
        own = {name for param in self.get_params(ctx) for name in param.opts}
        if not rest and not ctx.resilient_parsing:
            args = ["--help"]
        elif folded(first.partition("=")[0]) in own:
            args = rest
        elif first.startswith("-"):
            args = ["train", *args]
        elif first in self.commands:
            args = [first, *shared, *rest[1:]]
        else:
            # Whether a plugin's command is there follows from what is disabled.
            for place in range(len(args) - 1):
                if args[place] == "-p" and args[place + 1].startswith("no:"):
                    args = args[place : place + 2] + args[:place] + args[place + 2 :]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a file of options is told from a word that is none."""
        name = args[0]
        if name.endswith(CONFIG_SUFFIXES) and not ctx.resilient_parsing:
            what = f"no command named {name!r}; for a file of options"
            raise UsageError("command line", f"{what} use --config {name}")
        found, command, rest = super().resolve_command(ctx, args)
        if command and any("-p" in one.opts for one in command.params):
            for plugin in ctx.params["disabled_plugins"]:
                rest = ["-p", f"no:{plugin}", *rest]
        return found, command, rest

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Complete a command, or an option of `train`."""
        if not incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        train = self.commands["train"]
        inner = train.make_context("train", [], parent=ctx, resilient_parsing=True)
        own = super().shell_complete(ctx, folded(incomplete))
        known = {item.value for item in own}
        more = train.shell_complete(inner, incomplete)
        return [*own, *(item for item in more if item.value not in known)]


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
