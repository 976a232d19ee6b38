"""The flags of recipes for each card, and their peaks: cards.toml of each family, computed
from shapes, and the table of docs/guide/recipes.md.

    python -m benchmarks.gpu.recipes          writes the files
    python -m benchmarks.gpu.recipes wan-style flux-edit
                                              rewrites the files for these goals alone
    python -m benchmarks.gpu.recipes check    exit status 1 where one differs
    python -m benchmarks.gpu.recipes table    prints the table that the files make
"""

import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dstrain.config import as_size
from dstrain.errors import nearest
from dstrain.plugin import ModelFamily
from dstrain.registry import load_family
from dstrain_planner.memory.planning import MemoryPlan
from dstrain_planner.recipes.record import (
    CARDS,
    Goal,
    Recipe,
    goals_of,
    name_part,
    recipes_of,
)
from dstrain_planner.sizes import parse_size

from benchmarks.gpu.cards import LEFT_OUT, plan

FAMILIES = ("flux", "flux2", "qwen_image", "sdxl", "wan", "z_image")
SIZES = ("12GB", "16GB", "24GB", "48GB", "80GB")
HEAD = """\
# Computed by `python -m benchmarks.gpu.recipes`: for each card the cheapest flags with which
# a goal fits, and the peaks of both stages. Nothing here was measured.
"""


def computed(goal: Goal, sizes: Sequence[str] = SIZES) -> dict[str, dict[str, Any]]:
    """Return for each card on which a goal fits its flags, and the peaks with them."""
    runs: dict[str, MemoryPlan] = {}
    found = {}
    for card in sizes:
        options = {one.option: one.value for one in goal.on_card(card)}
        key = json.dumps(options)
        if key not in runs:
            options["feature_cache"] = Path(options["feature_cache"])
            runs[key] = plan({"model": goal.family, **options, **goal.largest})
        fitting = fit(runs[key], card)
        if fitting:
            found[card] = fitting
    return found


def fit(run: MemoryPlan, card: str) -> dict[str, Any]:
    """Return the flags with which a run of both stages fits on a card, and its peaks; {}
    if none are known.
    """
    way = run.cheapest(parse_size("--card", card))
    if way is None:
        return {}
    options = {
        name: value
        for name, value in way.changes.items()
        if name not in LEFT_OUT and value is not None and value is not False
    }
    first, second = run.estimate_stages(way)
    peaks = [as_size(first.peak), as_size(second.peak)]
    ram = {"ram": as_size(second.ram)} if second.ram else {}
    return {"options": options, "peaks": peaks, **ram}


def place(family: ModelFamily) -> Path:
    """Return the file of a family's cards."""
    package, _, folder = family.recipes.partition(":")
    return Path(str(files(package) / folder / CARDS))


def stem(goal: Goal) -> str:
    """Return the name of a goal's recipes without the card."""
    return f"{name_part(goal.family)}-{goal.key}"


def page(family: ModelFamily, wanted: Collection[str] = ()) -> str:
    """Return the text of a family's file of cards, in which goals that are not wanted
    stay as the file has them; all are computed if none is named.
    """
    written = tomllib.loads(place(family).read_text()) if wanted else {}
    lines = [HEAD]
    for goal in goals_of(family):
        is_computed = not wanted or stem(goal) in wanted
        cards = computed(goal) if is_computed else written.get(goal.key, {})
        for card, one in cards.items():
            key = goal.key if "." not in goal.key else json.dumps(goal.key)
            lines.append(f"[{key}.{card}]")
            lines += [f"{name} = {_toml(value)}" for name, value in one.items()]
            lines.append("")
            if is_computed:
                print(family.name, goal.key, card, one["peaks"], file=sys.stderr)
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """Write a value as TOML: a table in line, all else as JSON has it."""
    if not isinstance(value, Mapping):
        return json.dumps(value)
    inside = ", ".join(f"{name} = {_toml(one)}" for name, one in value.items())
    return f"{{ {inside} }}" if inside else "{}"


def table() -> Iterator[str]:
    """Yield the lines of the page's table: the larger of the two peaks for each card."""
    cards = [size.lower() for size in SIZES]
    yield f"| recipe | trains | {' | '.join(cards)} |"
    yield "|" + "---|" * (2 + len(cards))
    for name in FAMILIES:
        family = load_family(name)
        recipes = {recipe.name: recipe for recipe in recipes_of(family)}
        for goal in goals_of(family):
            cells = [_cell(recipes.get(f"{stem(goal)}-{card}")) for card in cards]
            yield f"| `{stem(goal)}-`CARD | {goal.title} | {' | '.join(cells)} |"


def _cell(recipe: Recipe | None) -> str:
    if recipe is None:
        return ""
    peak = max(float(one.removesuffix(" GiB")) for one in recipe.peaks)
    frames = recipe.options.get("num_frames", 1)
    return f"{peak:.2f}" if frames == 1 else f"{peak:.2f}, {frames} frames"


def differing() -> Iterator[Path]:
    """Yield the files that are not what is computed."""
    for name in FAMILIES:
        family = load_family(name)
        if place(family).read_text() != page(family):
            yield place(family)


def main(words: Sequence[str]) -> int:
    """Write the files, or those of the goals that are named; with "check" compare them."""
    if "check" in words:
        wrong = list(differing())
        for path in wrong:
            print(f"differs: {path}", file=sys.stderr)
        return 1 if wrong else 0
    if "table" in words:
        print("\n".join(table()))
        return 0
    families = [load_family(name) for name in FAMILIES]
    known = {stem(goal): family for family in families for goal in goals_of(family)}
    for word in words:
        if word not in known:
            print(f"no goal {word!r}{nearest(word, known)}", file=sys.stderr)
            return 2
    for family in families:
        if not words or family in [known[word] for word in words]:
            place(family).write_text(page(family, words))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
