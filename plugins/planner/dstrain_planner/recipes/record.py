"""Read a family's recipes: the options of a training run for a goal on a card, each with
its source. Imports no torch.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dstrain.plugin import ModelFamily, TrainConfig, UsageError, nearest
from dstrain.plugin.commands import flags_by_name, how_to_have

from dstrain_planner.sizes import parse_size

GOALS = "goals.toml"
"""The file of what is trained, written by hand."""
CARDS = "cards.toml"
"""The file of the flags for each card and their peaks, written by what computes them."""
UNTESTED = "untested"
"""In place of a source: a value that is nobody's published one."""
COMPUTED = "computed"
"""In place of a source: flags that are computed from the peak that they lead to."""
UNSOURCED = frozenset({"variant", "model_id", "lora_base_model", "extra_inputs"})
"""Options that say what is trained, which no source can be right or wrong about."""
CACHE = "dstrain-cache"
"""The feature cache of a recipe, in the working directory; all recipes share it."""
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "model": "The family.",
        "model_id": "The model, by its id on the hub.",
        "learning_rate": "How far a step goes: higher learns faster, and breaks sooner.",
        "lora_rank": "The size of the LoRA: higher learns more of its dataset, and takes more memory and disk.",
        "weight_decay": "How much trained weights shrink with each step.",
        "save_steps": "Weights are saved every so many steps.",
        "keep_checkpoints": "Only so many of the newest are kept.",
        "use_gradient_checkpointing": "Activations are computed again in the backward pass, a third more computation, "
        "in place of being kept.",
        "use_gradient_checkpointing_offload": "Activations are computed again in the backward pass, and what is left "
        "of them waits in RAM.",
        "blocks_to_swap": "This many blocks of the denoiser wait in RAM, and are copied to the card to compute. With "
        "memory to spare, take fewer: that is faster.",
        "quant_options": "Frozen weights in fewer bytes: half with int8_block, an error of .7 %.",
        "bitsandbytes": "Frozen weights in fewer bytes: half with int8_block, an error of .7 %; .28 with "
        "bitsandbytes_nf4, an error of 9 %, for which `pip install bitsandbytes` is needed.",
        "tiled": "The VAE encodes in tiles, which changes its results a little.",
        "offload_models": "Encoders wait in RAM, and are on the card one at a time.",
    }
)
"""Option, or a library in its value -> what it does, where a recipe says nothing."""
NEEDED = ("dataset_base_path", "output_path")
"""Options that every user gives."""


@dataclass(frozen=True)
class Setting:
    """An option of a recipe with its value."""

    option: str
    value: Any
    why: str = ""
    """Why it has this value; '' where what the option is for says it."""
    source: str = ""
    """Name of its source, `UNTESTED`, `COMPUTED`, or '' for what no source is about."""

    @property
    def reason(self) -> str:
        """Return why it is there, or what it does; '' where neither is known here."""
        library = "bitsandbytes"
        key = library if library in str(self.value) else self.option
        return self.why or REASONS.get(key, "")


@dataclass(frozen=True)
class Source:
    """A published configuration that values are taken from."""

    title: str
    url: str


@dataclass(frozen=True)
class Recipe:
    """The options of a training run for a goal on a card."""

    name: str
    """FAMILY-GOAL-CARD, with the card as in 24gb."""
    family: str
    goal: str
    """What is trained: style, character, edit or motion."""
    title: str
    data: str
    """The dataset that it wants, in words."""
    card: str
    """The card that it fits on, such as 24GB."""
    settings: tuple[Setting, ...]
    asked: tuple[Setting, ...]
    """Options that are the user's own, with examples."""
    peaks: tuple[str, str]
    """The computed peaks of stage 1 and stage 2."""
    ram: str
    """RAM for weights in stage 2; '' for none."""
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Return the values by option."""
        return {one.option: one.value for one in self.settings}

    def texts(self) -> dict[str, str | list[str]]:
        """Return the values as they are typed, with a list for an option that is repeated."""
        return {one.option: _typed(one.value) for one in self.settings}


@dataclass(frozen=True)
class Goal:
    """What is trained, before there is a card."""

    key: str
    """Its part of a recipe's name."""
    family: str
    goal: str
    title: str
    data: str
    settings: tuple[Setting, ...]
    on: Mapping[str, tuple[Setting, ...]]
    """Card -> settings that are different there."""
    asked: tuple[Setting, ...]
    largest: Mapping[str, int]
    """The largest sample that peaks are computed for, where no option bounds it."""
    sources: Mapping[str, Source]

    def on_card(self, card: str) -> tuple[Setting, ...]:
        """Return the settings on a card, without those about memory."""
        changed = {one.option: one for one in self.on.get(card, ())}
        same = tuple(changed.pop(one.option, one) for one in self.settings)
        return (*same, *changed.values())

    def recipe(self, card: str, computed: Mapping[str, Any]) -> Recipe:
        """Return the recipe for a card, of what was computed for it."""
        memory = tuple(
            Setting(name, value, source=COMPUTED)
            for name, value in computed["options"].items()
        )
        settings = (*self.on_card(card), *memory)
        stage_1, stage_2 = computed["peaks"]
        return Recipe(
            name=f"{name_part(self.family)}-{self.key}-{card.lower()}",
            family=self.family,
            goal=self.goal,
            title=self.title,
            data=self.data,
            card=card,
            settings=settings,
            asked=self.asked,
            peaks=(stage_1, stage_2),
            ram=computed.get("ram", ""),
            sources={
                one.source: self.sources[one.source]
                for one in settings
                if one.source in self.sources
            },
        )


def name_part(family: str) -> str:
    """Return how names of recipes begin with a family's name."""
    return family.replace("_", "-")


def goals_of(family: ModelFamily) -> list[Goal]:
    """Return the goals of a family; raises UsageError for what is wrong in its file."""
    if not family.recipes:
        return []
    table = _read(family, GOALS)
    try:
        sources = {
            name: Source(**_table(one))
            for name, one in _table(table.pop("sources", {})).items()
        }
        tables = {key: _table(own) for key, own in table.items()}
    except TypeError as error:
        raise _wrong(family, GOALS, str(error)) from error
    merged: dict[str, dict[str, Any]] = {}
    for key, own in tables.items():
        like = own.get("like", key)
        if like != key and like not in merged:
            what = f"[{key}] is like {like!r}, which is not above it{nearest(like, merged)}"
            raise _wrong(family, GOALS, what)
        merged[key] = _merged(merged.get(like, {}), own)
    return [_goal(family, key, one, sources) for key, one in merged.items()]


def recipes_of(family: ModelFamily) -> list[Recipe]:
    """Return the recipes of a family, by goal and then by card, the smallest first.

    Raises UsageError for what is wrong in its files.
    """
    if not family.recipes:
        return []
    goals = {goal.key: goal for goal in goals_of(family)}
    computed = _read(family, CARDS)
    for key in computed:
        if key not in goals:
            what = f"[{key}] is no goal of {GOALS}{nearest(key, goals)}"
            raise _wrong(family, CARDS, what)
    found = []
    for key, goal in goals.items():
        cards = _table(computed.get(key, {}))
        for card in sorted(cards, key=card_size):
            try:
                recipe = goal.recipe(card, cards[card])
            except (LookupError, TypeError, ValueError) as error:
                what = f"[{key}.{card}] lacks options or two peaks: {error!r}"
                raise _wrong(family, CARDS, what) from error
            _check_options(family, CARDS, key, recipe.settings)
            found.append(recipe)
    return found


def card_size(card: str) -> int:
    """Return the bytes of a card; raises UsageError for a name such as 'big'."""
    return parse_size("--card", card)


def select(
    recipes: Iterable[Recipe], goal: str | None = None, card: str | None = None
) -> list[Recipe]:
    """Return the recipes of a goal, and for each thing to train only the one that takes
    most of a card of this size.
    """
    found = [one for one in recipes if goal in (None, one.goal)]
    if card is None:
        return found
    size = card_size(card)
    best: dict[str, Recipe] = {}
    for one in found:
        if card_size(one.card) <= size:
            best[one.name.removesuffix(one.card.lower())] = one
    return list(best.values())


def named(name: str, recipes: Iterable[Recipe], where: str = "--recipe") -> Recipe:
    """Return the recipe of a name, in which '_' and capitals do not count; raises
    UsageError that names the nearest, or each card if the name lacks it.

    where: what the name was given to.
    """
    by_name = {one.name: one for one in recipes}
    typed = name.lower().replace("_", "-")
    found = by_name.get(typed)
    if found is None:
        # The list says CARD where each card stands.
        stem = typed.removesuffix("-card")
        cards = [one for one in by_name if one.rpartition("-")[0] == stem]
        hint = f"; it lacks its card: {', '.join(cards)}" if cards else ""
        what = f"no recipe named {name!r}{hint or nearest(name, by_name)}"
        raise UsageError(where, what, "`dstrain recipes` lists them")
    return found


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a goal with what it has from another: options one by one, all
    else as a whole.
    """
    options = {**base.get("options", {}), **own.get("options", {})}
    merged = {**base, **own, "options": options}
    merged.pop("like", None)
    return merged


def _goal(
    family: ModelFamily, key: str, table: dict[str, Any], sources: Mapping[str, Source]
) -> Goal:
    try:
        settings = tuple(_settings(table.pop("options")))
        on = {card: tuple(_settings(one)) for card, one in table.pop("on", {}).items()}
        asked = tuple(_settings(table.pop("asked", {})))
        goal = Goal(
            key=key,
            family=family.name,
            settings=(*settings, _cache()),
            on=on,
            asked=asked,
            largest=table.pop("largest", {}),
            sources=MappingProxyType(dict(sources)),
            **table,
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _wrong(family, GOALS, f"[{key}]: {error!r}") from error
    changed = [one for some in on.values() for one in some]
    for one in (*settings, *changed):
        needs_source = one.option not in UNSOURCED and one.source != UNTESTED
        if needs_source and one.source not in sources:
            what = f"[{key}] {one.option} has no source; expected one of [sources], or {UNTESTED!r}"
            raise _wrong(family, GOALS, what)
    _check_options(family, GOALS, key, (*settings, *asked, *changed))
    return goal


def _cache() -> Setting:
    why = (
        "Captions, images and videos are encoded once into this folder; then the encoders "
        "are freed, and the denoiser has the card to itself. Other runs read it, too."
    )
    return Setting("feature_cache", CACHE, why)


def _settings(table: Any) -> Iterator[Setting]:
    for option, one in _table(table).items():
        yield Setting(option, **_table(one))


def _check_options(
    family: ModelFamily, file: str, key: str, settings: Iterable[Setting]
) -> None:
    known = [*flags_by_name(TrainConfig), *(one.name for one in family.options)]
    for one in settings:
        # A run that has one of a plugin that is absent is refused with how to have it.
        if one.option not in known and not how_to_have("options", one.option):
            what = f"[{key}] {one.option}: no such option{nearest(one.option, known)}"
            raise _wrong(family, file, what)


def _read(family: ModelFamily, name: str) -> dict[str, Any]:
    from importlib.resources import files  # no other command needs it

    package, _, folder = family.recipes.partition(":")
    try:
        text = (files(package) / folder / name).read_text(encoding="utf-8")
        return tomllib.loads(text)
    except (OSError, TypeError, ValueError, ModuleNotFoundError) as error:
        raise _wrong(family, name, f"cannot be read: {error}") from error


def _wrong(family: ModelFamily, file: str, what: str) -> UsageError:
    return UsageError(f"plugin {family.name}", f"its recipes, {file}: {what}")


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table, got {value!r}")
    return value


def _typed(value: Any) -> str | list[str]:
    if isinstance(value, list):
        return [str(one) for one in value]
    return str(value).lower() if isinstance(value, bool) else str(value)
