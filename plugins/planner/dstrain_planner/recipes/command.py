"""Define `dstrain recipes`."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from itertools import groupby
from textwrap import wrap
from types import MappingProxyType
from typing import Any

import click
from dstrain.plugin import ModelFamily, TrainConfig, UsageError, families, nearest
from dstrain.plugin.commands import (
    PAGE_WIDTH,
    Command,
    Group as CommandGroup,
    as_size,
    as_table,
    assignment,
    completing,
    flags_by_name,
    headings,
    load_family,
    shared_options,
)

from dstrain_planner.recipes.finding import all_recipes, find_recipe, recipes_named
from dstrain_planner.recipes.record import (
    COMPUTED,
    NEEDED,
    UNTESTED,
    Recipe,
    Setting,
    card_size,
    name_part,
    recipes_of,
    select,
)

EXAMPLES = MappingProxyType({"dataset_base_path": "photos", "output_path": "out"})
"""Option that every user gives -> an example."""
TRIAL = "--max_steps 10"
"""What makes a run of a recipe short."""
EXAMPLE_CARD = "24GB"
"""The card in examples of commands."""
FIVE_CARDS = "12gb 16gb 24gb 48gb 80gb"
"""The longest column of cards."""
LISTS = "`dstrain recipes` lists all"
ALIKE = 0.75
"""Least similarity of a word to what is offered in its place."""


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
    every = (
        recipes_of(load_family(model, disabled_plugins))
        if model is not None
        else all_recipes(disabled_plugins)
    )
    goals = sorted({one.goal for one in every})
    if goal is not None and goal not in goals:
        of_family = f" of {model}" if model is not None else ""
        what = (
            f"no recipe{of_family} is for {goal!r}; goals: {', '.join(goals) or 'none'}"
        )
        others = all_recipes(disabled_plugins) if model is not None else []
        if any(one.goal == goal for one in others):
            raise UsageError(
                "--goal", what, f"other families: dstrain recipes --goal {goal}"
            )
        raise UsageError("--goal", what + nearest(goal, goals))
    found = select(every, goal, card)
    if every and not found:
        least = min(every, key=lambda one: card_size(one.card)).card
        what = f"no recipe fits on {card}; the least card of any is {least}"
        raise UsageError("--card", what)
    if as_json:
        click.echo(json.dumps([as_data(one) for one in found], indent=2))
    elif not found:
        click.echo(
            "no installed family has recipes"
            if model is None
            else f"{model} has no recipes"
        )
    elif card is not None:
        click.echo(_fitting(found))
    else:
        click.echo("\n".join(_by_goal(found)))


def show(name: str | None, as_json: bool, disabled_plugins: tuple[str, ...]) -> None:
    """Print a recipe as a TOML file for --config."""
    if name is None:
        what = "needs the name of a recipe; `dstrain recipes` lists them"
        raise UsageError("recipes show", what)
    recipe = find_recipe(name, disabled_plugins, "recipes show")
    if as_json:
        click.echo(json.dumps(as_data(recipe), indent=2))
    else:
        click.echo(as_toml(recipe, load_family(recipe.family, disabled_plugins)))


class RecipesGroup(CommandGroup):
    """The command `dstrain recipes`, which says what is meant by a word that is no command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; raise UsageError for another word, such as a family."""
        if args[0] in self.commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        what = f"no command named {args[0]!r}"
        raise UsageError(
            "recipes", what, _meant(args[0], ctx.params["disabled_plugins"])
        )


def _meant(word: str, disabled_plugins: Collection[str]) -> str:
    """Return the command that lists or shows what a word names."""
    every = all_recipes(disabled_plugins)
    typed = word.lower().replace("_", "-")
    commands = {"list": "dstrain recipes", "ls": "dstrain recipes"}
    for one in every:
        commands[one.name] = f"dstrain recipes show {one.name}"
        commands[name_part(one.family)] = f"dstrain recipes --model {one.family}"
        commands[one.goal] = f"dstrain recipes --goal {one.goal}"
        commands[one.card.lower()] = f"dstrain recipes --card {one.card}"
    begun = [name for name in commands if name.startswith(typed)]
    close = begun or get_close_matches(typed, commands, 1, ALIKE)
    if close:
        return f"did you mean: {commands[min(close, key=len)]}"
    return f"{LISTS}; `dstrain recipes --help` says how to list fewer"


def _names(typed: str) -> Iterable[tuple[str, str]]:
    return recipes_named(typed.lower().replace("_", "-"))


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
            ["--goal"], metavar="GOAL", help="Of this goal, such as style or motion."
        ),
        click.Option(
            ["--card"],
            metavar="SIZE",
            help="Those that make the most of a card of this size, such as 24GB.",
        ),
    )
    one = Command(
        "show",
        callback=show,
        help=show.__doc__,
        params=[
            # What is required is said in `show`, with what lists the names.
            click.Argument(
                ["name"],
                metavar="NAME",
                required=False,
                shell_complete=completing(_names),
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


def _by_goal(found: Sequence[Recipe]) -> Iterator[str]:
    """Yield lines for each thing to train, with the cards of its recipes."""
    groups = groupby(found, key=lambda one: one.name.removesuffix(one.card.lower()))
    for stem, of_stem in groups:
        several = list(of_stem)
        cards = " ".join(one.card.lower() for one in several)
        yield f"{stem}CARD".ljust(PAGE_WIDTH - len(FIVE_CARDS)) + cards
        yield from _lines(several[0].title, "    ")
    example = next((one for one in found if one.card == EXAMPLE_CARD), found[0])
    size = example.card.removesuffix("GB")
    yield ""
    yield from _lines(
        f"CARD is the memory of your card: {example.name} is for one of {size} GB.", ""
    )
    yield "To list those for a card, with the memory that they take:"
    yield f"    dstrain recipes --card {example.card}"
    if len({(one.family, one.goal) for one in found}) > 1:
        yield "To list some of these:"
        yield f"    dstrain recipes --model {example.family} --goal {example.goal}"
    yield from _next_commands(example)


def _next_commands(example: Recipe) -> Iterator[str]:
    yield "To read one, and to train with it:"
    yield f"    dstrain recipes show {example.name}"
    yield f"    dstrain train --recipe {example.name} \\"
    yield f"        {_needed_flags()}"
    yield f"The last one with {TRIAL} --toy is a try with a tiny model."


def _fitting(found: Sequence[Recipe]) -> str:
    """Return a table of recipes with their peaks."""
    rows = [(one.name, max(one.peaks, key=_gib), one.ram) for one in found]
    table = as_table(("recipe", "peak", "weights in RAM"), rows)
    lines = (table, "", "Peaks are computed, not measured.", *_next_commands(found[0]))
    return "\n".join(lines)


def _gib(size: str) -> float:
    return float(size.split()[0])


def _needed_flags(output_path: str = EXAMPLES["output_path"]) -> str:
    given = {**EXAMPLES, "output_path": output_path}
    return " ".join(f"--{name} {given[name]}" for name in NEEDED)


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
    known = flags_by_name(TrainConfig)
    numbers = {name: number for number, name in enumerate(recipe.sources, 1)}
    lines = [*_head(recipe, numbers), "", *_rule("yours")]
    lines += _comment("Give these on the command line, or here without the '#'.")
    needed = [Setting(name, EXAMPLES[name]) for name in NEEDED]
    needed[0] = Setting(
        needed[0].option, needed[0].value, f"The dataset: {recipe.data}"
    )
    needed[1] = Setting(needed[1].option, needed[1].value, "Where weights are saved")
    for one in (*needed, *recipe.asked):
        why = f"{one.why[:1].upper()}{one.why[1:]}".rstrip(".") + "."
        lines += [*_comment(why), f"# {assignment(one.option, one.value, known)}"]
    groups: dict[str, list[Setting]] = {}
    for one in (Setting("model", recipe.family), *recipe.settings):
        group = known[one.option].group if one.option in known else family.name
        if one.source == COMPUTED:
            group = "memory"
        groups.setdefault(group, []).append(one)
    for group in (*headings(groups.keys() - {family.name}), family.name):
        if group in groups:
            lines += ["", *_rule(group)]
        for one in groups.get(group, ()):
            lines += [
                *_comment(_reason(one, known, numbers)),
                assignment(one.option, one.value, known),
            ]
    return "\n".join(lines)


def _head(recipe: Recipe, numbers: dict[str, int]) -> Iterator[str]:
    yield f"# {recipe.name}"
    yield from _comment(f"{recipe.title[:1].upper()}{recipe.title[1:]}.")
    yield "#"
    yield from _comment("Save this as a file, change what you like, and run:")
    yield "#     dstrain train --config FILE.toml \\"
    yield f"#         {_needed_flags()}"
    command = f"dstrain train --recipe {recipe.name}"
    yield from _comment("Unchanged, it is the same as:")
    yield f"#     {command} \\"
    yield f"#         {_needed_flags()}"
    yield from _comment(
        "To try it first, train a tiny model for ten steps, in seconds and without a "
        "download:"
    )
    yield f"#     {command} {TRIAL} --toy \\"
    yield f"#         {_needed_flags('try-toy')}"
    yield from _comment("Then train the real one for ten steps:")
    yield f"#     {command} {TRIAL} \\"
    yield f"#         {_needed_flags('try')}"
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
    yield f"# ---- {title} ".ljust(PAGE_WIDTH, "-")


def _comment(text: str) -> list[str]:
    return _lines(text, "# ")


def _lines(text: str, indent: str) -> list[str]:
    """Break a text between words alone, so that names and addresses stay whole."""
    return wrap(
        text,
        PAGE_WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _reason(one: Setting, known: Mapping[str, Any], numbers: dict[str, int]) -> str:
    why = one.reason
    if not why and one.option in known:
        why = known[one.option].help.partition(". ")[0].rstrip(".") + "."
    if one.option == "model_id":
        why = f"{why} To try this file first, add --toy, which replaces the model with a tiny one."
    mark = ""
    if one.source in numbers:
        mark = f"[{numbers[one.source]}]"
    elif one.source == UNTESTED:
        mark = "[untested]"
    return f"{why} {mark}".strip()
