"""Define the commands of `dstrain cache`; what imports torch is imported when one runs."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from dstrain.cli.click_options import FilePath, file_path, shared_options
from dstrain.cli.help import Command, Group
from dstrain.console import printable, status

CACHE = "CACHE"
NAMED = MappingProxyType(
    {
        "model_id": "Model that decodes latents: a published id, a folder or a file.",
        "model_paths": "Its local files: a JSON list.",
        "model_id_with_origin_paths": "Its published files, as ID:PATTERN, ...",
        "dataset_base_path": "Dataset whose captions are shown.",
        "dataset_metadata_path": "Its metadata file.",
    }
)
"""Options of training that `show` takes, too: it opens nothing because a plan names it."""


def cache(disabled_plugins: tuple[str, ...]) -> None:
    """List, check and move feature caches."""
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
        from dstrain.runs import as_lines, listing

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
        from dstrain.runs import repair, verify as run

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
        from dstrain.runs import prune as run

    can_answer = sys.stdin is not None and sys.stdin.isatty()
    ask = partial(click.confirm, "remove it?") if can_answer else None
    run(folder, plans, is_sure, ask)


def show(
    folder: Path,
    output: Path,
    plan: str | None,
    rows: tuple[range, ...],
    limit: int,
    disabled_plugins: tuple[str, ...],
    **named: Any,
) -> None:
    """Write samples of a feature cache as one HTML page.

    Latents are decoded with the model that is named, and captions are those of the dataset
    that is named.
    """
    with status():
        from dstrain.runs import Wanted, show as run

    given = {name: value for name, value in named.items() if value is not None}
    given["disabled_plugins"] = disabled_plugins
    run(folder, output, Wanted(plan, rows, limit, given))


def row_ranges(text: str | tuple[range, ...]) -> tuple[range, ...]:
    """Return the rows that '0-9,42' means."""
    if isinstance(text, tuple):
        return text  # the default
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise click.BadParameter(f"expected rows such as 0-9,42, got {text!r}")
        found.append(range(int(first), int(last or first) + 1))
    return tuple(found)


def export(
    folder: Path,
    output: Path,
    plans: tuple[str, ...],
    disabled_plugins: tuple[str, ...],
) -> None:
    """Write plans of a feature cache for another machine.

    The values that they use go with them. OUTPUT is a new folder, or a file that ends with .tar.
    """
    with status():
        from dstrain.runs import export as run

    run(folder, output, plans)


def import_(source: Path, folder: Path, disabled_plugins: tuple[str, ...]) -> None:
    """Add what was exported to a feature cache.

    INPUT is the folder or the tar; CACHE is made if there is none.
    """
    with status():
        from dstrain.runs import import_cache

    import_cache(source, folder)


def cache_group() -> click.Group:
    """Return `dstrain cache` with its commands."""
    as_json = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
    plan = click.Option(
        ["--plan", "plans"],
        multiple=True,
        metavar="NAME",
        help="Remove this plan too, with what only it uses. Can be repeated.",
    )
    of_plan = click.Option(
        ["--plan", "plans"],
        multiple=True,
        metavar="NAME",
        help="Export this plan. Can be repeated. Defaults to all.",
    )
    output = click.Argument(["output"], type=file_path, metavar="OUTPUT")
    source = click.Argument(["source"], type=file_path, metavar="INPUT")
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
    return Group(
        "cache",
        commands=(
            _command("ls", ls, several, as_json),
            _command("verify", verify, one, repairs),
            _command("prune", prune, one, plan, yes),
            _command("show", show, one, *_show_options()),
            _command("export", export, one, output, of_plan),
            _command("import", import_, source, one),
        ),
        invoke_without_command=True,
        callback=cache,
        help=cache.__doc__,
        params=[*shared_options()],
    )


def _show_options() -> list[click.Option]:
    """Return the options of `show`."""
    return [
        click.Option(
            ["--output"],
            type=FilePath(is_file=True),
            metavar="FILE.html",
            required=True,
            help="File to write.",
        ),
        click.Option(
            ["--plan"],
            metavar="NAME",
            help="Show samples of this plan. Defaults to the newest.",
        ),
        click.Option(
            ["--rows"],
            type=row_ranges,
            default=(),
            metavar="A-B,C,...",
            help="Rows of the dataset, from 0. Defaults to some of all, spread evenly.",
        ),
        click.Option(
            ["--limit"],
            type=click.IntRange(min=1),
            default=100,
            show_default=True,
            help="Most samples to show.",
        ),
        *_named_options(),
    ]


def _named_options() -> list[click.Option]:
    """Return the options that name a model and a dataset."""
    return [
        click.Option(
            [f"--{name}"],
            type=file_path if name.startswith("dataset") else str,
            metavar="PATH" if name.startswith("dataset") else "TEXT",
            help=text,
        )
        for name, text in NAMED.items()
    ]


def _command(
    name: str, body: Callable[..., None], *params: click.Parameter
) -> click.Command:
    every = [*params, *shared_options()]
    return Command(name, callback=body, help=body.__doc__, params=every)
