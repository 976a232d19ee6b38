"""Find the inputs that the rows of a run have, and say what of its datasets is not read."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from dstrain.config import split_commas
from dstrain.config.numbers import parse_frames
from dstrain.console import get_logger
from dstrain.data import DataConfig, Dataset
from dstrain.data.forms import TEXT, Source, hidden_by, left_out_of
from dstrain.data.row_checks import input_columns
from dstrain.errors import about_dataset, first_few
from dstrain.graph import Column, with_measured
from dstrain.pipeline import MASK
from dstrain.pipeline.loss_masks import rows_without_masks
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
        source = own.data_config.source
        if source.form == "folder":
            for line in left_out_of(source.path, own.spec.inputs):
                logger.warning(setup.in_words(f"{source.path}: {line}"))


def lines_of_datasets(setup: Setup) -> list[str]:
    """Return a line for each dataset that is trained on: what is read, and from where."""
    lines = []
    for part in setup.parts:
        source, dataset = part.setup.data_config.source, part.setup.checked_dataset
        line = setup.in_words(_dataset_line(source, dataset))
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
        for line in _short_clips(found, parse_frames(own.config.num_frames)):
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


def _dataset_line(source: Source, dataset: Dataset) -> str:
    """Say where a dataset is, its form, its rows, and the columns that are read."""
    table = dataset.table
    read = sorted(dataset.columns.values(), key=lambda column: not column.is_file)
    columns = dict.fromkeys(column.name for column in read)
    names = []
    for name in columns:
        original = table.originals.get(name, name)
        if source.form == "folder":
            is_text = original == TEXT
            names.append(f"{name} from caption files" if is_text else name)
        else:
            names.append(name if name == original else f"{name} from {original}")
    rows = f"{len(table.rows)} row{'s' * (len(table.rows) != 1)}"
    form = "" if source.form == "table" else f"{source.in_words}, "
    line = f"dataset {source.path}: {form}{rows}: {', '.join(names)}"
    if source.left_out:
        line += f"; not read: {', '.join(source.left_out)}"
    return line


def _short_clips(dataset: Dataset, lengths: Sequence[int]) -> list[str]:
    """Say how many clips of a dataset have fewer frames than are asked for.

    lengths: The numbers of frames of --num_frames, rising.
    """
    clips = 0
    short: Counter[int] = Counter()
    counts = np.bincount(dataset.groups, minlength=len(dataset.signatures))
    # Samples of one signature have clips of one length.
    for common, count in zip(dataset.signatures, counts.tolist(), strict=True):
        for name, shapes in common:
            if name in dataset.columns and dataset.columns[name].kind == "video":
                clips += count
                if shapes[0][0] < lengths[0]:
                    short[shapes[0][0]] += count
    if not short:
        return []
    asked = f"fewer than --num_frames {lengths[0]} frames"
    if len(lengths) > 1:
        asked = f"fewer frames than {lengths[0]}, the least of --num_frames"
    return [
        f"{short.total()} of {clips} clips have {asked}; the shortest has {min(short)}"
    ]
