"""Define `dstrain recipes`, and find the recipe of `--recipe`; what looks for plugins is
imported when a command runs.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from textwrap import wrap
from types import MappingProxyType
from typing import Any, get_args

import click

from dstrain.cli.click_options import GroupedOption, shared_options
from dstrain.cli.completion import (
    families,
    recipe_cards,
    recipe_goals,
    recipe_names,
)
from dstrain.cli.help import Command, Group
from dstrain.config.fields import Flag, Group as OptionGroup, flags
from dstrain.config.options.train import TrainConfig
from dstrain.config.sizes import as_size
from dstrain.console import as_table, get_logger
from dstrain.errors import UsageError, nearest
from dstrain.registry.family import ModelFamily
from dstrain.registry.recipes import (
    COMPUTED,
    NEEDED,
    UNTESTED,
    Recipe,
    Setting,
    card_size,
    name_part,
    named,
    recipes_of,
    select,
)

logger = get_logger(__name__)
WIDTH = 80
"""Columns of what is printed."""
LISTED = "`dstrain recipes` lists the names"
EXAMPLES = MappingProxyType({"dataset_base_path": "photos", "output_path": "out"})
"""Option that every user gives -> an example."""


class RecipesGroup(Group):
    """The command `dstrain recipes`, which says of a family or recipe where it belongs."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; raise UsageError with the command that was probably meant."""
        from dstrain.registry.discovery import installed

        if args[0] in self.commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        typed = name_part(args[0].lower())
        names = dict.fromkeys(one.name for one in installed())
        lines = [
            f"to show a recipe: dstrain recipes show {typed}"
            if typed.startswith(f"{name_part(name)}-")
            else f"to list those of a family: dstrain recipes --model {name}"
            for name in names
            if name_part(name).startswith(typed)
            or typed.startswith(f"{name_part(name)}-")
        ]
        what = f"no command named {args[0]!r}; the only one is `show NAME`"
        raise UsageError("command line", what, *lines or (LISTED,))


def recipe_option() -> GroupedOption:
    """Return --recipe."""
    return GroupedOption(
        "--recipe",
        metavar="NAME",
        common=True,
        shell_complete=recipe_names,
        help="Start from a ready configuration (`dstrain recipes` lists them). --config and the command line take "
        "precedence.",
    )


def find_recipe(name: str, disabled_plugins: Collection[str] = ()) -> Recipe:
    """Return the recipe of a name; of the families, only the one that the name begins
    with is imported. Raises UsageError that names the nearest.
    """
    from dstrain.registry.discovery import installed, load_family

    typed = name.lower().replace("_", "-")
    for plugin in installed(disabled_plugins):
        if typed.startswith(f"{name_part(plugin.name)}-"):
            return named(name, recipes_of(load_family(plugin.name, disabled_plugins)))
    return named(name, _all_recipes(disabled_plugins))


def recipes(
    model: str | None,
    goal: str | None,
    card: str | None,
    as_json: bool,
    disabled_plugins: tuple[str, ...],
) -> None:
    """List ready configurations by family, goal and card, or show one."""
    if click.get_current_context().invoked_subcommand is not None:
        for flag, value in (("--model", model), ("--goal", goal), ("--card", card)):
            if value is not None:
                what = "has no effect here: it applies to the list of recipes"
                raise UsageError(flag, what)
        if as_json:
            what = "has no effect here: give it after the name"
            raise UsageError("--json", what)
        return
    from dstrain.registry.discovery import load_family

    every = (
        recipes_of(load_family(model, disabled_plugins))
        if model is not None
        else _all_recipes(disabled_plugins)
    )
    goals = sorted({one.goal for one in every})
    if goal is not None and goal not in goals:
        what = f"no recipe is for {goal!r}; goals: {', '.join(goals) or 'none'}"
        raise UsageError("--goal", what + nearest(goal, goals))
    found = select(every, goal, card)
    if every and not found:
        least = min(every, key=lambda one: card_size(one.card)).card
        what = f"no recipe fits on {card}; the least card of any is {least}"
        raise UsageError("--card", what)
    if as_json:
        click.echo(json.dumps([as_data(one) for one in found], indent=2))
    elif card is not None:
        click.echo(_fitting(found))
    else:
        click.echo("\n".join(_by_goal(found)))


def show(name: str | None, as_json: bool, disabled_plugins: tuple[str, ...]) -> None:
    """Print a recipe as a TOML file for --config."""
    from dstrain.registry.discovery import load_family

    if name is None:
        raise UsageError("command line", "missing argument 'NAME'", LISTED)
    recipe = find_recipe(name, disabled_plugins)
    if as_json:
        click.echo(json.dumps(as_data(recipe), indent=2))
    else:
        click.echo(as_toml(recipe, load_family(recipe.family, disabled_plugins)))


def recipes_group() -> click.Group:
    """Return `dstrain recipes` with its command."""
    as_json = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
    filters = (
        click.Option(
            ["--model"],
            metavar="FAMILY",
            shell_complete=families,
            help="Of this model family.",
        ),
        click.Option(
            ["--goal"],
            metavar="GOAL",
            shell_complete=recipe_goals,
            help="Of this goal, such as style or motion.",
        ),
        click.Option(
            ["--card"],
            metavar="SIZE",
            shell_complete=recipe_cards,
            help="Those that make the most of a card of this size, such as 24GB.",
        ),
    )
    one = Command(
        "show",
        callback=show,
        help=show.__doc__,
        params=[
            click.Argument(
                ["name"], metavar="NAME", required=False, shell_complete=recipe_names
            ),
            as_json,
            *shared_options(),
        ],
    )
    return RecipesGroup(
        "recipes",
        commands=(one,),
        invoke_without_command=True,
        callback=recipes,
        help=recipes.__doc__,
        params=[*filters, as_json, *shared_options()],
    )


def _all_recipes(disabled_plugins: Collection[str]) -> list[Recipe]:
    """Return the recipes of every family that can be used."""
    from dstrain.cli.inspection import ready_families

    families, broken = ready_families(disabled_plugins)
    found = []
    for one in broken:
        logger.warning("%s has no recipes here: it is broken", one.name)
    for family in families:
        try:
            found += recipes_of(family)
        except UsageError as error:
            logger.warning("%s: %s", error.where, error.what)
    return found


def _by_goal(found: Iterable[Recipe]) -> Iterator[str]:
    """Yield lines for each thing to train, with the names of its recipes by card."""
    groups = groupby(found, key=lambda one: one.name.removesuffix(one.card.lower()))
    for stem, cards in groups:
        several = list(cards)
        yield f"{several[0].family} {several[0].goal}: {several[0].title}"
        names = "  ".join(f"{stem}{one.card.lower()}" for one in several)
        yield from _lines(names, "    ")
    yield ""
    yield "`dstrain recipes --card 24GB` shows those for a card with their peaks,"
    yield "`dstrain recipes show NAME` one of them, and this trains with it:"
    yield f"    dstrain train --recipe NAME {_needed_flags()}"


def _fitting(found: Sequence[Recipe]) -> str:
    """Return a table of recipes with their peaks."""
    rows = [(one.name, max(one.peaks, key=_gib), one.ram) for one in found]
    lines = as_table(("recipe", "peak", "weights in RAM"), rows)
    return f"{lines}\n\npeaks are computed, not measured; `dstrain recipes show NAME` prints a recipe"


def _gib(size: str) -> float:
    return float(size.split()[0])


def _needed_flags() -> str:
    return " ".join(f"--{name} {EXAMPLES[name]}" for name in NEEDED)


def as_data(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as JSON data."""
    data = asdict(recipe)
    del data["settings"]
    data["options"] = recipe.options
    data["option_sources"] = {
        one.option: one.source for one in recipe.settings if one.source
    }
    data["asked"] = {one.option: one.value for one in recipe.asked}
    return data


def as_toml(recipe: Recipe, family: ModelFamily) -> str:
    """Return a recipe as a file that --config reads, with the reason of each line."""
    known = {flag.name: flag for flag in flags(TrainConfig)}
    numbers = {name: number for number, name in enumerate(recipe.sources, 1)}
    lines = [*_head(recipe, numbers), "", *_rule("yours")]
    lines += _comment("Give these on the command line, or here without the '#'.")
    needed = [Setting(name, EXAMPLES[name]) for name in NEEDED]
    needed[0] = Setting(
        needed[0].option, needed[0].value, f"The dataset: {recipe.data}."
    )
    needed[1] = Setting(needed[1].option, needed[1].value, "Where weights are saved.")
    for one in (*needed, *recipe.asked):
        why = one.why[:1].upper() + one.why[1:]
        lines += [*_comment(why), f"# {_assignment(one, known)}"]
    groups: dict[str, list[Setting]] = {}
    for one in (Setting("model", recipe.family), *recipe.settings):
        group = known[one.option].group if one.option in known else family.name
        if one.source == COMPUTED:
            group = "memory"
        groups.setdefault(group, []).append(one)
    for group in (*get_args(OptionGroup), family.name):
        if group in groups:
            lines += ["", *_rule(group)]
        for one in groups.get(group, ()):
            lines += [*_comment(_reason(one, known, numbers)), _assignment(one, known)]
    return "\n".join(lines)


def _head(recipe: Recipe, numbers: dict[str, int]) -> Iterator[str]:
    yield f"# {recipe.name}"
    yield from _comment(f"{recipe.title[:1].upper()}{recipe.title[1:]}.")
    yield "#"
    yield from _comment("Save this as a file, change what you like, and run:")
    yield "#     dstrain train --config FILE.toml \\"
    yield f"#         {_needed_flags()}"
    yield from _comment("Unchanged, it is the same as:")
    yield f"#     dstrain train --recipe {recipe.name} \\"
    yield f"#         {_needed_flags()}"
    yield "#"
    first, second = recipe.peaks
    ram = f", and {recipe.ram} of weights in RAM" if recipe.ram else ""
    size = as_size(card_size(recipe.card))
    yield from _comment(
        f"Memory, computed and not measured: a peak of {first} while the dataset is encoded, and of {second} in "
        f"training, of the {size} of a card of {recipe.card}{ram}."
    )
    yield "#"
    yield from _comment(
        "Numbers in brackets say where a value is from. The sources do not say for what "
        "each value is best: that they suit your dataset is untested."
    )
    for name, number in numbers.items():
        source = recipe.sources[name]
        yield from _comment(f"[{number}] {source.title}:")
        yield f"#     {source.url}"


def _rule(title: str) -> Iterator[str]:
    yield f"# ---- {title} ".ljust(WIDTH, "-")


def _comment(text: str) -> list[str]:
    return _lines(text, "# ")


def _lines(text: str, indent: str) -> list[str]:
    """Break a text between words alone, so that names and addresses stay whole."""
    return wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _reason(one: Setting, known: dict[str, Flag], numbers: dict[str, int]) -> str:
    why = one.reason
    if not why and one.option in known:
        why = known[one.option].help.partition(". ")[0].rstrip(".") + "."
    if one.option == "model_id":
        why = f"{why} To try this file first, add --toy, which replaces the model by a tiny one."
    mark = ""
    if one.source in numbers:
        mark = f"[{numbers[one.source]}]"
    elif one.source == UNTESTED:
        mark = "[untested]"
    return f"{why} {mark}".strip()


def _assignment(one: Setting, known: dict[str, Flag]) -> str:
    flag = known.get(one.option)
    value = [one.value] if flag is not None and flag.many else one.value
    return f"{one.option} = {json.dumps(value, ensure_ascii=False)}"
