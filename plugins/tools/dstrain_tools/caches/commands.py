"""Define `dstrain cache show`, `export` and `import`; what imports torch is imported when one
runs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from dstrain.plugin import FilePath
from dstrain.plugin.commands import Command, file_path, shared_options, status

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
        from dstrain_tools.caches.contact_sheet import Wanted, show as run

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
        from dstrain_tools.caches.exporting import export as run

    run(folder, output, plans)


def import_(source: Path, folder: Path, disabled_plugins: tuple[str, ...]) -> None:
    """Add what was exported to a feature cache.

    INPUT is the folder or the tar; CACHE is made if there is none.
    """
    with status():
        from dstrain_tools.caches.importing import import_cache

    import_cache(source, folder)


def commands() -> Sequence[click.Command]:
    """Return the commands; their first word is the group of dstrain's that they join."""
    of_plan = click.Option(
        ["--plan", "plans"],
        multiple=True,
        metavar="NAME",
        help="Export this plan. Can be repeated. Defaults to all.",
    )
    output = click.Argument(["output"], type=file_path, metavar="OUTPUT")
    source = click.Argument(["source"], type=file_path, metavar="INPUT")
    cache = click.Argument(["folder"], type=file_path, metavar=CACHE)
    return (
        _command("cache show", show, cache, *_show_options()),
        _command("cache export", export, cache, output, of_plan),
        _command("cache import", import_, source, cache),
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
