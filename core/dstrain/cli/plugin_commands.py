"""Groups of commands that plugins add to: by "NAME" to `dstrain` itself, by "cache NAME" to
`dstrain cache`.
"""

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from dstrain.cli.click_options import COMMAND_NAMES
from dstrain.cli.help import Group
from dstrain.console import get_logger
from dstrain.errors import UsageError, nearest
from dstrain.installed import COMMAND_GROUP, how_to_have, installed

logger = get_logger(__name__)
OFFERED = "dstrain.commands_of_plugins"
"""Key of `Context.meta` for the commands that plugins add."""


class OpenGroup(Group):
    """A group of dstrain's commands to which plugins add others."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command of dstrain or of a plugin; plugins are imported only for
        another word than dstrain's own.
        """
        return super().get_command(ctx, cmd_name) or self.offered(ctx).get(cmd_name)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the commands, then those of plugins, which are not imported: a plugin
        that is slow or broken harms no help.
        """
        super().format_commands(ctx, formatter)
        declared = self.declared(ctx)
        if declared:
            # One column for both lists.
            width = max(map(len, [*self.commands, *declared]))
            with formatter.section("Commands of plugins"):
                formatter.write_dl(
                    (name.ljust(width), of) for name, of in declared.items()
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; raise UsageError with the names of all if there is none."""
        name = args[0]
        command = self.get_command(ctx, name)
        if command is not None:
            return name, command, args[1:]
        if ctx.resilient_parsing:
            return None, None, args[1:]
        known = [*self.commands, *self.offered(ctx)]
        what = f"no command named {name!r}; commands: {', '.join(known)}"
        disabled = ctx.params.get("disabled_plugins", ())
        if advice := how_to_have("commands", self._prefix(ctx) + name, disabled):
            raise UsageError("command line", what, advice)
        raise UsageError("command line", what + nearest(name, known))

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Complete a command of dstrain, or one that the metadata of a plugin names."""
        own = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            return own
        return own + [
            CompletionItem(name, help=of)
            for name, of in self.declared(ctx).items()
            if name.startswith(incomplete)
        ]

    def declared(self, ctx: click.Context) -> dict[str, str]:
        """Return the commands of this group that the metadata of plugins names, with what
        adds each.
        """
        disabled = ctx.params.get("disabled_plugins", ())
        return {
            name: f"From {one.distribution}; {ctx.command_path} {name} -h says what it does."
            for one in installed(disabled, COMMAND_GROUP)
            for name in self._own_names(ctx, [one.name])
            if name not in self.commands
        }

    def offered(self, ctx: click.Context) -> dict[str, click.Command]:
        """Return the commands that plugins add to this group, by name."""
        if OFFERED not in ctx.meta:
            from dstrain.registry import load_extensions

            disabled = ctx.find_root().params.get("disabled_plugins", ())
            disabled += ctx.params.get("disabled_plugins", ())
            extensions = load_extensions(disabled)
            ctx.meta[OFFERED] = extensions.offered(
                "dstrain_commands", click.Command, COMMAND_NAMES
            )
            for reason in extensions.broken:
                logger.warning(reason)
        offered: dict[str, click.Command] = ctx.meta[OFFERED]
        prefix = self._prefix(ctx)
        return {name: offered[prefix + name] for name in self._own_names(ctx, offered)}

    def _own_names(self, ctx: click.Context, names: Iterable[str]) -> list[str]:
        """Return the names in this group of those of these commands that are in it."""
        prefix = self._prefix(ctx)
        found = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return [name for name in found if " " not in name]

    def _prefix(self, ctx: click.Context) -> str:
        """Return what names of plugins' commands in this group begin with."""
        return f"{self.name} " if ctx.parent else ""
