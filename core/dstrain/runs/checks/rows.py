"""Find the inputs that the rows of a run have, and say what of its datasets is not read."""

from collections import Counter

import numpy as np

from dstrain.config.numbers import parse_frames
from dstrain.console import get_logger, number_of
from dstrain.data import Dataset
from dstrain.data.row_checks import input_columns
from dstrain.data.tables import TEXT, Source, beside_table, left_out
from dstrain.errors import about_dataset, first_few
from dstrain.graph import with_measured
from dstrain.pipeline import MASK
from dstrain.pipeline.masked_spec import rows_without_masks
from dstrain.registry import warn_once
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
    """Name the plugins that are broken and not used; say what is read of each dataset, what
    is not, and which clips are short.
    """
    warn_once(setup.extensions.broken)
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
        if source.form != "folder":
            continue
        if line := left_out(source.path, own.spec.inputs):
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


def warnings_of_rows(setup: Setup) -> list[str]:
    """Return what there is to say of short clips, of rows without a mask, and of captioned
    files beside a table that was found.
    """
    lines = []
    for part in setup.parts:
        own = part.setup
        found = setup.dataset if own is setup else part.dataset
        least = parse_frames(own.config.num_frames)[0]
        for line in _short_clips(found, least):
            lines.append(line if own is setup else f"{found.table.path}: {line}")
        if MASK in own.spec.inputs:
            lines += rows_without_masks(found)
        is_table = own.data_config.source.form == "table"
        if is_table and own.config.dataset_metadata_path is None:
            table = own.checked_dataset.table
            if line := beside_table(table):
                lines.append(f"{table.path}: beside it, {line}")
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
    form = "" if source.form == "table" else f"{source.in_words}, "
    line = f"dataset {source.path}: {form}{number_of(len(table.rows), 'row')}: {', '.join(names)}"
    if unread := [*source.left_out, *dataset.unused_columns]:
        line += f"; not read: {first_few(unread)}"
    return line


def _short_clips(dataset: Dataset, least: int) -> list[str]:
    """Say how many clips of a dataset have fewer frames than the least of --num_frames."""
    videos = [name for name, one in dataset.columns.items() if one.kind == "video"]
    clips = 0
    short: Counter[int] = Counter()
    counts = np.bincount(dataset.groups, minlength=len(dataset.signatures))
    # Samples of one signature have clips of one length.
    for common, count in zip(dataset.signatures, counts.tolist(), strict=True):
        for name, shapes in common:
            if name in videos:
                clips += count
                if shapes[0][0] < least:
                    short[shapes[0][0]] += count
    if not short:
        return []
    asked = f"fewer frames than {least}, the least of --num_frames"
    shortest = f"the shortest has {min(short)}"
    return [f"{short.total()} of {clips} clips have {asked}; {shortest}"]
