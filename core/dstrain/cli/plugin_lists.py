"""The commands that list models and plugins."""

import dataclasses
import json

import click

from dstrain.console import PAGE_WIDTH, as_table, status
from dstrain.errors import UsageError

LOOKING = "looking at plugins ..."
"""What a terminal shows while plugins are imported, each in a process of its own."""


def models(
    family: str | None, variant: str | None, disabled_plugins: tuple[str, ...]
) -> None:
    """List the installed model families and the models they know.

    Of a FAMILY, it lists what each variant needs and makes.
    """
    from dstrain.cli.inspection import inspect_all
    from dstrain.installed import GROUP

    if family is not None:
        _show_variants(family, variant, disabled_plugins)
        return
    if variant is not None:
        raise UsageError("--variant", "has no effect without the name of a family")
    with status(LOOKING):
        found = inspect_all(disabled_plugins, (GROUP,))
    rows = [
        (one.name, one.distribution, one.version, one.reason or ", ".join(one.variants))
        for one in found
    ]
    head = ("name", "distribution", "version", "variants")
    click.echo(as_table(head, rows, PAGE_WIDTH))
    for one in found:
        if one.model_ids:
            of_family = (f"--model_id of {one.name}", "variants")
            click.echo("\n" + as_table(of_family, one.model_ids.items(), PAGE_WIDTH))
    click.echo("\nwhat a family's variants need: dstrain models FAMILY")


def _show_variants(
    name: str, variant: str | None, disabled_plugins: tuple[str, ...]
) -> None:
    """Print what variants of a family need and make."""
    from dstrain.cli.inspection import variant_lines
    from dstrain.registry import load_family, variant_of

    family = load_family(name, disabled_plugins)
    chosen = family.variants if variant is None else (variant_of(family, variant),)
    with status():
        described = {one: [*variant_lines(family, one)] for one in chosen}
    tables = []
    for one, (first, *rest) in described.items():
        heading = click.style(one, bold=True)
        tables.append(f"{heading}\n{as_table(first, rest, PAGE_WIDTH)}")
    click.echo("\n\n".join(tables))


def plugins(as_json: bool, disabled_plugins: tuple[str, ...]) -> None:
    """List the installed plugins or create a new one.

    The list shows what each plugin adds, or why it cannot be used.
    """
    from dstrain.cli.inspection import inspect_all

    if click.get_current_context().invoked_subcommand is not None:
        if as_json:
            what = "has no effect here: it applies to the list of plugins"
            raise UsageError("--json", what)
        return
    with status(LOOKING):
        findings = inspect_all(disabled_plugins)
    if as_json:
        rows = [dataclasses.asdict(found) for found in findings]
        click.echo(json.dumps(rows, indent=2))
        return
    lines = []
    for found in findings:
        distribution = f"{found.distribution} {found.version}"
        what = found.reason or ", ".join([*found.variants, *found.adds])
        lines.append((found.name, distribution, found.state, what))
    head = ("name", "distribution", "state", "variants, additions, or the reason")
    click.echo(as_table(head, lines, PAGE_WIDTH))
