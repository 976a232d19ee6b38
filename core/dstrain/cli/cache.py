"""Define the commands of `dstrain cache`; what imports torch is imported when one runs."""

import json
import sys
from functools import partial
from pathlib import Path

import click

from dstrain.cli.click_options import command, file_path, shared_options
from dstrain.cli.plugin_commands import OpenGroup
from dstrain.console import printable, status

CACHE = "CACHE"


def cache(disabled_plugins: tuple[str, ...]) -> None:
    """List and check feature caches."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def ls(
    folders: tuple[Path, ...], as_json: bool, disabled_plugins: tuple[str, ...]
) -> None:
    """List what feature caches contain.

    Rows, values by unit, bytes, what is shared, and the plans that use it.
    """
    with status():
        from dstrain.cache.commands.listing import as_lines, listing

    found = [listing(folder) for folder in folders]
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        click.echo(printable("\n\n".join(map(as_lines, found))))


def verify(folder: Path, repairs: bool, disabled_plugins: tuple[str, ...]) -> None:
    """Check every byte of a feature cache.

    Damaged files are listed, and the exit code is 3.
    """
    with status():
        from dstrain.cache.commands.verify import repair, verify as run

    run(folder, partial(repair, folder) if repairs else None)


def prune(
    folder: Path,
    plans: tuple[str, ...],
    is_sure: bool,
    disabled_plugins: tuple[str, ...],
) -> None:
    """Remove what no plan of a feature cache uses.

    What goes is listed first. Without --yes, nothing is removed, or a terminal is asked.
    """
    with status():
        from dstrain.cache.commands.prune import prune as run

    can_answer = sys.stdin is not None and sys.stdin.isatty()
    ask = partial(click.confirm, "remove it?") if can_answer else None
    run(folder, plans, is_sure, ask)


def cache_group() -> click.Group:
    """Return `dstrain cache` with its commands."""
    as_json = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
    plan = click.Option(
        ["--plan", "plans"],
        multiple=True,
        metavar="NAME",
        help="Remove this plan too, with what only it uses. Can be repeated.",
    )
    repairs = click.Option(
        ["--repair", "repairs"],
        is_flag=True,
        help="Remove what is damaged, and print the command that computes it again.",
    )
    yes = click.Option(["--yes", "is_sure"], is_flag=True, help="Remove it.")
    one = click.Argument(["folder"], type=file_path, metavar=CACHE)
    several = click.Argument(
        ["folders"], type=file_path, metavar="CACHE...", nargs=-1, required=True
    )
    return OpenGroup(
        "cache",
        commands=(
            command("ls", ls, several, as_json),
            command("verify", verify, one, repairs),
            command("prune", prune, one, plan, yes),
        ),
        invoke_without_command=True,
        callback=cache,
        help=cache.__doc__,
        params=[*shared_options()],
    )
