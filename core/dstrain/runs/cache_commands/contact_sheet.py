"""`dstrain cache show`: write the samples of a plan as one HTML page, latents decoded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from torch import Tensor

from dstrain.cache.in_use import reading
from dstrain.config import flags_by_name
from dstrain.config.fields import check_value
from dstrain.config.options import TrainConfig
from dstrain.console import get_logger, number_of, progress_bar, redacted
from dstrain.data import CaptionOptions, Table
from dstrain.data.forms import Reading, parse_columns
from dstrain.data.rows.loaded import AS_WRITTEN
from dstrain.errors import (
    CacheError,
    DstrainError,
    OutOfMemory,
    SystemFault,
    UsageError,
)
from dstrain.graph import Column, Frames, PipelineSpec, deserialize
from dstrain.models import DTYPES, default_device, find, precision
from dstrain.models.naming import model_configs
from dstrain.pipeline import Pipeline, with_overrides
from dstrain.randomness import Rng, SampleKey
from dstrain.registry import ModelFamily, load_family, variant_of
from dstrain.runs.cache_commands.contents import Contents, PlanContents
from dstrain.runs.cache_commands.page import Card, write_page
from dstrain.runs.cache_commands.prune import named_plan
from dstrain.runs.datasets.flags import caption_inputs, data_config
from dstrain.runs.datasets.sources import dataset_source
from dstrain.runs.feature_plan import CacheInfo
from dstrain.runs.plan_identity import USE

logger = get_logger(__name__)

LATENTS = "input_latents"
"""The value that the losses take as the latents of a sample."""
FRAMES = 4
"""Frames of a video that are shown."""
RECORDED = (
    *("column", "default_caption", "caption_lines"),
    *("trigger_word", "caption_prefix", "caption_suffix"),
)
"""The recorded options that are used: they name no file. A stranger may have written them."""
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
    with reading(folder):
        contents = Contents.of(folder)
        plan = _plan(contents, wanted.plan)
        chosen = choose(plan, wanted.rows, wanted.limit)
        notes: list[str] = []
        what = "neither captions nor decoded latents are shown"
        source = _or_note(notes, what, partial(source_of, plan, wanted))
        decode: Decode | None = None
        captions: Callable[[int], str] = _no_caption
        if source is not None:
            if LATENTS in plan.values:
                what = "latents are not decoded"
                decode = _or_note(notes, what, partial(decoder, source))
            else:
                notes.append(f"the plan has no {LATENTS} to decode")
            what = "captions are not shown"
            captions = _or_note(notes, what, partial(texts, source, plan)) or captions
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
    trained = [one for one in contents.plans if USE not in one.record["identity"]]
    return [*contents.plans, *trained][-1]


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


@dataclass(frozen=True)
class Source:
    """What says how a plan is shown."""

    config: TrainConfig
    family: ModelFamily
    spec: PipelineSpec


def source_of(plan: PlanContents, wanted: Wanted) -> Source:
    """Return what says how a plan is shown; opens nothing.

    Raises DstrainError for recorded options that are none, or a family that is not here.
    """
    recorded = plan.about.get("config", {})
    known = flags_by_name(TrainConfig)
    values = {name: recorded[name] for name in RECORDED if name in recorded}
    for name, value in values.items():
        if known[name].many:
            values[name] = tuple(value if isinstance(value, list) else [value])
        check_value(known[name], values[name])
    identity = plan.record["identity"]
    config = TrainConfig(model=identity["family"], **{**values, **wanted.named})
    family = load_family(config.model, config.disabled_plugins)
    variant = variant_of(family, identity["variant"])
    return Source(config, family, with_overrides(family.spec(variant), family, config))


def decoder(source: Source) -> Decode:
    """Load the decoders of a variant; return a function that decodes a sample.

    Raises DstrainError where their files are not here.
    """
    spec = source.spec
    asked = [name for one in spec.decoders for name in one.components]
    names = [name for name in spec.components if name in asked]
    models = model_configs(source.config, source.family)
    found = find(source.family, models, names, (), spec.components)
    device = default_device()
    dtype = DTYPES[precision(None, device)]
    pipeline = Pipeline.from_found(source.family, spec, found, device, dtype)
    constants = {name: one.value for name, one in spec.constants.items()}
    others = {**spec.defaults, **constants}

    def decode(values: Mapping[str, Any]) -> Any:
        latents: Tensor = values[LATENTS]
        rng = Rng([SampleKey(0, 0, 0, 0)])
        return pipeline.decode(latents.to(device), {**others, **values}, rng)

    return decode


def texts(source: Source, plan: PlanContents) -> Callable[[int], str]:
    """Return a function that gives the texts of a row of the dataset.

    Raises UsageError where none is named, or another one than that of the plan.
    """
    config = source.config
    dataset = dataset_source(config)
    if dataset is None:
        raise UsageError("--dataset_base_path", "is not given")
    if dataset.digest() != plan.about["dataset"]["sha256"]:
        what = "is not what the plan was made from, or has changed"
        raise UsageError(dataset.path, what)
    columns = {
        name: one.name
        for name, one in source.spec.inputs.items()
        if isinstance(one, Column) and one.kind in ("text", "texts")
    }
    captions = caption_inputs(source.spec)
    reading = Reading(parse_columns(config.column), config.default_caption)
    table = reading.read(dataset, source.spec.inputs, [*columns.values()])
    own = data_config(config, source.spec).captions
    options = {
        column: own if name in captions else AS_WRITTEN
        for name, column in columns.items()
        if column in table.columns
    }
    return partial(_text, table, options)


def _text(table: Table, columns: Mapping[str, CaptionOptions], row: int) -> str:
    """Return the texts of a row as the model is given them, each on a line."""
    lines = []
    for name, options in columns.items():
        value = table.rows[row][name]
        if options == AS_WRITTEN:
            lines.append(str(value))
        else:
            lines += [caption for _, caption in options.captions(value)]
    return "\n".join(lines)


def _no_caption(row: int) -> str:
    return ""


def _facts(plan: PlanContents) -> list[str]:
    identity = plan.record["identity"]
    dataset = plan.about["dataset"]
    return [
        f"{identity['family']} {identity['variant']}, task {identity['task']}",
        f"plan {plan.path.stem}",
        f"{dataset['path']}",
    ]


def _cards(
    contents: Contents,
    plan: PlanContents,
    chosen: Sequence[int],
    decode: Decode | None,
    caption: Callable[[int], str],
) -> Iterator[Card]:
    cache = contents.cache
    rows = cache.plan_rows(plan.path)
    info = CacheInfo(**plan.about)
    for index in chosen:
        forms = rows[index]["values"]
        values = {}
        sizes = []
        for value, form in forms.items():
            if "at" not in form:
                values[value] = deserialize(form, {})
                continue
            header = cache.header(form["at"])
            sizes.append(f"{value} {_shape(header)}")
            is_shown = value == LATENTS and decode is not None
            if is_shown or "image" in header or "video" in header:
                values[value] = cache.read(form["at"])
        images = list(_images(values))
        if decode is not None and LATENTS in values:
            images = [*_images({"": decode(values)}), *images]
        row = int(plan.rows[index])
        chunk = rows[index]["chunk"]
        name = info.name_row({"row": row, "line": int(plan.lines[index])})
        place = f"row {row} ({name})"
        place += f", chunk {chunk}" if chunk else ""
        yield Card(images, caption(row), place, sizes)


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
