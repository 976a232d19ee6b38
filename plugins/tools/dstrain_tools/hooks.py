"""The commands that this package adds to `dstrain`."""

from collections.abc import Sequence

import click
from dstrain.plugin import hookimpl


@hookimpl
def dstrain_commands() -> Sequence[click.Command]:
    """Return the commands."""
    from dstrain_tools.importing.command import import_command

    return [import_command()]
