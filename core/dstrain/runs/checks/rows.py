"""Find the inputs that the rows of a run have, and say what of its datasets is not read."""

from collections.abc import Iterator, Sequence

from dstrain.config import split_commas
from dstrain.config.sizes import parse_frames
from dstrain.console import get_logger
from dstrain.data import DataConfig, Dataset
from dstrain.data.forms import hidden_by
from dstrain.data.row_checks import input_columns
from dstrain.errors import about_dataset, first_few
from dstrain.graph import Column, with_measured
from dstrain.pipeline import MASK
from dstrain.pipeline.loss_masks import rows_without_masks
from dstrain.runs.datasets.said import dataset_line, left_out_lines, short_clips
from dstrain.runs.datasets.sources import dataset_source
from dstrain.runs.setup import Setup

logger = get_logger(__name__)


def dataset_inputs(setup: Setup) -> frozenset[str]:
    """Return the inputs that the columns of the metadata give, of several datasets those
    that any of them gives; without metadata, all.
    """
    source = dataset_source(setup.config)
    if source is None:
        return setup.all_inputs()
    found: set[str] = set()
    sources = source.parts or (source,)
    for part, own in zip(setup.parts, sources, strict=True):
        inputs, data = part.setup.spec.inputs, part.setup.data_config
        with about_dataset(part.options.name):
            table = data.reading.read_columns(own, inputs)
            found |= with_measured(input_columns(table, data, inputs), inputs)
    return frozenset(found)


def log_warnings(setup: Setup) -> None:
    """Name the plugins that are broken and not used, short clips, and the
    columns that no input reads.
    """
    for reason in setup.extensions.broken:
        logger.warning(reason)
    if setup.stage == "train":
        return
    for one in setup.datasets:
        for line in lines_of_datasets(one):
            logger.info(line)
        log_left_out(one)
    for line in warnings_of_rows(setup):
        logger.warning(line)


def log_left_out(setup: Setup) -> None:
    """Warn of what is in folders with captions and is not read."""
    for part in setup.parts:
        own = part.setup
        for line in left_out_lines(own.data_config.source, own.spec.inputs):
            logger.warning(setup.in_words(line))


def lines_of_datasets(setup: Setup) -> list[str]:
    """Return a line for each dataset that is trained on: what is read, and from where."""
    lines = []
    for part in setup.parts:
        source, dataset = part.setup.data_config.source, part.setup.checked_dataset
        line = setup.in_words(dataset_line(source, dataset))
        if part.options.repeats != 1:
            line += f"; {part.options.repeats} times in an epoch"
        if part.options.loss_weight != 1:
            line += f"; its loss counts {part.options.loss_weight:g}"
        lines.append(line)
    return lines


def inputs_to_ask_for(setup: Setup, unused: Sequence[str]) -> list[str]:
    """Return the optional inputs that columns without a use would give."""
    return [
        name
        for name, source in setup.spec.inputs.items()
        if isinstance(source, Column) and source.optional and source.name in unused
    ]


def variations_without_effect(data: DataConfig, dataset: Dataset) -> Iterator[str]:
    """Yield the flags of a dataset that give no row another caption or crop."""
    inputs = data.caption_inputs & dataset.columns.keys()
    names = [dataset.columns[one].name for one in inputs]

    def captions() -> Iterator[str]:
        for row in dataset.table.rows:
            for name in names:
                value = row[name]
                yield from [value] if isinstance(value, str) else value

    least = data.captions.keep_tags + 1
    changes = {
        "--shuffle_tags changes no caption": not data.captions.shuffle_tags
        or any(text.count(",") >= least for text in captions()),
        "--caption_lines changes no caption": not data.captions.split_lines
        or any("\n" in text.strip() for text in captions()),
        "--crops changes no image": data.augmentation.crops == 1
        or any(dataset.cropped),
    }
    yield from (f"{dataset.table.path}: {one}" for one in changes if not changes[one])


def warnings_of_rows(setup: Setup) -> list[str]:
    """Return what there is to say of short clips and of columns that no input reads."""
    lines = []
    for part in setup.parts:
        own = part.setup
        found = setup.dataset if own is setup else part.dataset
        for line in short_clips(found, parse_frames(own.config.num_frames)):
            lines.append(line if own is setup else f"{found.table.path}: {line}")
        if MASK in own.spec.inputs:
            lines += rows_without_masks(found)
        lines += variations_without_effect(own.data_config, found)
    for part in setup.parts:
        found, own = part.setup.checked_dataset, part.setup
        table = found.table.path
        is_found = own.config.dataset_metadata_path is None and table.is_file()
        if is_found and (hidden := hidden_by(found.table)):
            lines.append(f"{table}: {hidden}")
        unused = found.unused_columns
        if unused:
            names = first_few(map(repr, unused))
            which = f"{len(unused)} columns are" if len(unused) > 1 else "a column is"
            place = found.table.path
            extra = inputs_to_ask_for(own, unused)
            by = "" if extra else " by this variant"
            line = f"{place}: {which} not used{by}: {names}"
            if "mask" in unused:
                line += "; use --mask_column mask to weigh the loss by it"
            if extra:
                wanted = ",".join([*split_commas(own.config.extra_inputs), *extra])
                line += f"; optional inputs are read with --extra_inputs {wanted}"
            lines.append(line)
    return lines
