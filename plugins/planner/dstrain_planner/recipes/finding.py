"""Find recipes among the families that are installed."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import accumulate
from operator import eq

from dstrain.plugin import (
    DstrainError,
    TrainConfig,
    UsageError,
    get_logger,
    split_commas,
)
from dstrain.plugin.commands import (
    command_line,
    flags_by_name,
    installed,
    load_family,
    usable_families,
)

from dstrain_planner.recipes.record import (
    COMPUTED,
    Recipe,
    name_part,
    named,
    recipes_of,
)

logger = get_logger("dstrain.recipes")
FULL_LEARNING_RATE = 1e-5
"""The learning rate in advice on full training, as in docs/guide/troubleshooting.md."""


def find_recipe(
    name: str, disabled_plugins: Collection[str] = (), where: str = "--recipe"
) -> Recipe:
    """Return the recipe of a name; of the families, only the one that the name begins
    with is imported. Raises UsageError that names the nearest.

    where: what the name was given to.
    """
    typed = name.lower().replace("_", "-")
    for plugin in installed(disabled_plugins):
        if typed.startswith(f"{name_part(plugin.name)}-"):
            family = load_family(plugin.name, disabled_plugins)
            return named(name, recipes_of(family), where)
    for family_name in accumulate(typed.split("-"), "{}_{}".format):
        try:
            load_family(family_name, disabled_plugins)
        except UsageError as error:
            if error.help_lines:  # how to have a family that is not installed
                what = f"no installed family has {name!r}"
                raise UsageError(where, what, *error.help_lines) from error
    return named(name, all_recipes(disabled_plugins), where)


def all_recipes(disabled_plugins: Collection[str]) -> list[Recipe]:
    """Return the recipes of every family that can be used."""
    families, broken = usable_families(disabled_plugins)
    found = []
    for reason in broken:
        logger.warning(reason)
    for family in families:
        try:
            found += recipes_of(family)
        except UsageError as error:
            logger.warning("%s: %s", error.where, error.what)
    return found


def recipes_beginning(beginning: str = "") -> list[Recipe]:
    """Return the recipes of the families of which a recipe's name may begin so."""
    names = [
        one.name
        for one in installed()
        if all(map(eq, f"{name_part(one.name)}-", beginning))  # as far as both go
    ]
    families, _ = usable_families(names=names)
    found: list[Recipe] = []
    for family in families:
        with suppress(DstrainError):
            found += recipes_of(family)
    return found


def recipes_named(beginning: str) -> Iterator[tuple[str, str]]:
    """Yield the names that begin so, each with its title; only families that a recipe can
    be of are imported.
    """
    for one in recipes_beginning(beginning):
        if one.name.startswith(beginning):
            yield one.name, one.title


def refuse_full_training(name: str, config: TrainConfig) -> None:
    """Refuse to train in full what a recipe adds LoRA to: its values, its flags about
    memory and its peaks are for LoRA. Raises UsageError with the command without them.
    """
    try:
        recipe = find_recipe(name, config.disabled_plugins)
    except UsageError:
        return  # a script may name one that is only its own
    component = config.lora_base_model
    trained = {name.partition(".")[0] for name in split_commas(config.trainable_models)}
    if component not in trained or component != recipe.options.get("lora_base_model"):
        return
    known = flags_by_name(TrainConfig)
    left_out = {
        one.option: known[one.option].default
        for one in recipe.settings
        if one.option in known
        and (one.source == COMPUTED or known[one.option].group == "LoRA")
    }
    if config.learning_rate == recipe.options.get("learning_rate"):
        left_out["learning_rate"] = FULL_LEARNING_RATE
    command = command_line(config, **left_out)
    raise UsageError(
        "--trainable_models",
        f"trains {component} in full, but recipe {recipe.name} is for LoRA on it, and so are its peaks",
        f"for full training without the recipe: {command}",
        "it takes far more memory: with --dry_run as well, the command says how much",
    )
