"""What this package adds to `dstrain`. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstrain.plugin import Defaults, Section, UsageError, hookimpl

if TYPE_CHECKING:
    import click
    from dstrain.plugin import PlannedRun

api = 2


@hookimpl
def dstrain_dry_run(planned: PlannedRun) -> Sequence[Section]:
    """Return what the run needs in memory and on disk, and whether it fits."""
    from dstrain_planner.memory.report import sections

    return [*sections(planned)]


@hookimpl
def dstrain_defaults(
    options: Mapping[str, Any], disabled_plugins: Collection[str]
) -> Sequence[Defaults]:
    """Return the values of the recipe that is asked for."""
    if options.get("recipe") is None:
        return []
    from dstrain_planner.recipes.finding import find_recipe

    recipe = find_recipe(str(options["recipe"]), disabled_plugins)
    model = options.get("model") or recipe.family
    if model != recipe.family:
        what = f"is {model}, but recipe {recipe.name} is for {recipe.family}"
        raise UsageError("--model", what)
    # The dataset may lack a column that only such a dataset has.
    notes = {"extra_inputs": f"the recipe is for {recipe.data}"}
    values = {"model": recipe.family, **recipe.texts()}
    return [Defaults(f"recipe {recipe.name}", values, notes)]


@hookimpl
def dstrain_commands() -> Sequence[click.Command]:
    """Return `dstrain recipes`."""
    from dstrain_planner.recipes.command import recipes_group

    return [recipes_group()]
