"""The commands that this package adds to `dstrain`."""

from collections.abc import Mapping, Sequence

import click
from dstrain.plugin import hookimpl

api = 2


@hookimpl
def dstrain_commands() -> Sequence[click.Command]:
    """Return the commands."""
    # Imported here, so that one that cannot be imported is named with its hook.
    from dstrain_tools.caches.commands import commands as of_caches
    from dstrain_tools.captioning.command import command as caption
    from dstrain_tools.importing.command import import_command

    return [caption(), import_command(), *of_caches()]


@hookimpl
def dstrain_hints() -> Mapping[str, str]:
    """Return what to use in place of options, models and variables of other trainers."""
    from dstrain_tools.hints import hints

    return hints()
