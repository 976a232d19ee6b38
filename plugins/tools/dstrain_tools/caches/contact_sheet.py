"""`dstrain cache show`: write the samples of a plan as one HTML page, latents decoded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dstrain import CacheError, OutOfMemory, SystemFault
from dstrain.cache import Contents, PlanContents, named_plan, open_contents
from dstrain.generation import ShownPlan
from dstrain.plugin import (
    DstrainError,
    Frames,
    UsageError,
    get_logger,
    progress_bar,
    redacted,
)
from dstrain.plugin.commands import number_of
from PIL import Image

from dstrain_tools.caches.page import Card, write_page

logger = get_logger("dstrain.cache")

LATENTS = "input_latents"
"""The value that is decoded."""
FRAMES = 4
"""Frames of a video that are shown."""
Made = TypeVar("Made")
Decode = Callable[[Mapping[str, Any]], Any]
"""The values of a sample -> its image or video."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of a page."""

    plan: str | None
    """The beginning of a plan's name; without one, the newest plan."""
    rows: Sequence[range]
    """Rows of the dataset, from 0; without any, some of all, spread evenly."""
    limit: int
    named: Mapping[str, Any]
    """The options that name a model and a dataset; nothing else is opened."""


def show(folder: Path, output: Path, wanted: Wanted) -> None:
    """Write the page.

    Raises UsageError for an output that exists, for the name of no plan, and for rows
    that the plan does not have; StateError for a folder that is no cache, or damaged.
    What cannot be decoded or captioned here is said on the page.
    """
    if output.exists() or output.is_symlink():
        what = f"{output} already exists; existing files were not modified"
        raise UsageError("--output", what, "move it away, or give another --output")
    with open_contents(folder) as contents:
        plan = _plan(contents, wanted.plan)
        chosen = choose(plan, wanted.rows, wanted.limit)
        notes: list[str] = []
        what = "neither captions nor decoded latents are shown"
        shown = _or_note(notes, what, partial(ShownPlan.of, plan, wanted.named))
        decode: Decode | None = None
        captions: Callable[[int], str] = _no_caption
        if shown is not None:
            decode = _or_note(notes, "latents are not decoded", shown.decoder)
            what = "captions are not shown"
            captions = _or_note(notes, what, shown.texts) or captions
        cards = _cards(contents, plan, chosen, decode, captions)
        with progress_bar("show", len(chosen)) as progress:
            write_page(
                output,
                title=f"{len(chosen):,} of {len(plan.rows):,} samples of {folder}",
                facts=_facts(plan),
                notes=[redacted(note) for note in notes],
                cards=_counted(cards, progress),
            )
    for note in notes:
        logger.warning(note)
    samples = number_of(len(chosen), "sample")
    print(redacted(f"wrote {output}: {samples}"))


def _plan(contents: Contents, name: str | None) -> PlanContents:
    if name is not None:
        return named_plan(contents.plans, name)
    if not contents.plans:
        raise CacheError(contents.cache.folder, "contains no plan")
    # Those that are trained on last.
    return sorted(contents.plans, key=lambda one: not one.stored.use)[-1]


def choose(plan: PlanContents, rows: Sequence[range], limit: int) -> list[int]:
    """Return the samples to show: those of the rows, or some of all, spread evenly."""
    if not rows:
        total = len(plan.rows)
        count = min(limit, total)
        return [index * total // count for index in range(count)]
    chosen: list[int] = []
    for wanted in rows:
        inside = (plan.rows >= wanted.start) & (plan.rows < wanted.stop)
        found = inside.nonzero()[0].tolist()
        if not found:
            first, last = plan.rows.min(), plan.rows.max()
            what = f"no row {wanted.start}; the plan has rows {first} to {last}"
            raise UsageError("--rows", what)
        chosen += found
    return chosen[:limit]


def _or_note(notes: list[str], what: str, make: Callable[[], Made]) -> Made | None:
    """Return what is made; where it cannot be made here, add the reason to the notes."""
    try:
        return make()
    except (OutOfMemory, SystemFault):
        raise
    except DstrainError as error:
        notes.append(f"{what}: {error.where}: {error.what}")
    return None


def _no_caption(row: int) -> str:
    return ""


def _facts(plan: PlanContents) -> list[str]:
    identity = plan.stored.identity
    return [
        f"{identity['family']} {identity['variant']}, task {identity['task']}",
        f"plan {plan.stored.name}",
        f"{plan.stored.info.dataset['path']}",
    ]


def _cards(
    contents: Contents,
    plan: PlanContents,
    chosen: Sequence[int],
    decode: Decode | None,
    caption: Callable[[int], str],
) -> Iterator[Card]:
    for sample in contents.samples(plan, chosen):
        sizes = [f"{name} {_shape(one)}" for name, one in sample.headers.items()]
        values = dict(sample.literals)
        for name, header in sample.headers.items():
            is_shown = name == LATENTS and decode is not None
            if is_shown or "image" in header or "video" in header:
                values[name] = sample.read(name)
        images = list(_images(values))
        if decode is not None and LATENTS in values:
            images = [*_images({"": decode(values)}), *images]
        place = f"row {sample.row} ({sample.name})"
        place += f", chunk {sample.chunk}" if sample.chunk else ""
        yield Card(images, caption(sample.row), place, sizes)


def _images(values: Mapping[str, Any]) -> Iterator[Image.Image]:
    """Yield the images among values, and a few frames of each video."""
    for value in values.values():
        if isinstance(value, Image.Image):
            yield value
        elif isinstance(value, Frames):
            total = len(value.pixels)
            count = min(FRAMES, total)
            for number in range(count):
                frame = number * (total - 1) // max(count - 1, 1)
                yield Image.fromarray(value.pixels[frame].numpy())


def _shape(header: Any) -> str:
    """Return the shapes of a stored value's tensors, in words."""
    if "shape" in header:
        return " x ".join(map(str, header["shape"])) or "scalar"
    children = header.get("list") or header.get("record", {}).values()
    return ", ".join(map(_shape, children)) or "-"


def _counted(cards: Iterator[Card], progress: Any) -> Iterator[Card]:
    for card in cards:
        yield card
        progress.update()
