"""The command `dstrain`: what stands before the name of a command, or in its place."""

import click
from click.shell_completion import CompletionItem

from dstrain.cli.completion import folded
from dstrain.cli.plugin_commands import OpenGroup
from dstrain.errors import UsageError

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
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a file of options is told from a word that is none."""
        name = args[0]
        if name.endswith(CONFIG_SUFFIXES) and not ctx.resilient_parsing:
            what = f"no command named {name!r}; for a file of options"
            raise UsageError("command line", f"{what} use --config {name}")
        return super().resolve_command(ctx, args)

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
