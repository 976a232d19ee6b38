"""How --help looks, and -h, which shows the common options alone."""

import re
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

import click

BRIEF = "dstrain.brief_help"
"""Key of `Context.meta` that is there while -h is answered."""
HELP = ("-h", "--help")
"""The options that print help."""
COLUMN = 26
"""Width of the options beside their descriptions: what is longer gets a line of its own."""
CLAUSE_END = re.compile(r"(?<=[\w)])[.;](?= |$)")
"""Where the first clause of a description ends."""


class Formatter(click.HelpFormatter):
    """Help with bold headings, and little room for the names of options."""

    def write_heading(self, heading: str) -> None:
        """Write a heading."""
        bold = click.style(f"{heading}:", bold=True)
        self.write(f"{'':>{self.current_indent}}{bold}\n")

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the line of usage."""
        super().write_usage(prog, args, click.style(prefix or "Usage: ", bold=True))

    def write_dl(
        self,
        rows: Iterable[tuple[str, str]],
        col_max: int = COLUMN,
        col_spacing: int = 2,
    ) -> None:
        """Write names with their descriptions."""
        super().write_dl(rows, col_max, col_spacing)


class Context(click.Context):
    """A context whose help looks like dstrain's."""

    formatter_class = Formatter


class Command(click.Command):
    """A command whose help looks like dstrain's."""

    context_class = Context


class Group(click.Group):
    """A group of commands whose help looks like dstrain's."""

    context_class = Context


def write_sections(
    formatter: click.HelpFormatter, rows: Iterable[tuple[str, tuple[str, str]]]
) -> None:
    """Write options with their descriptions, under the heading that each has; those of a
    heading stand together.
    """
    for heading, found in groupby(rows, key=itemgetter(0)):
        with formatter.section(heading):
            # One column for all headings.
            own = [(name.ljust(COLUMN), text) for _, (name, text) in found]
            formatter.write_dl(own)


def first_clause(text: str) -> str:
    """Return the beginning of a description, for -h."""
    return CLAUSE_END.split(text, maxsplit=1)[0]


def show_brief(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Print the common options and end: what -h does."""
    if not value or ctx.resilient_parsing:
        return
    ctx.meta[BRIEF] = True
    click.echo(ctx.get_help(), color=ctx.color)
    ctx.exit()
