"""Say in one line what is read of a dataset, and in another what of its clips is short."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from dstrain.data import Dataset
from dstrain.data.forms import TEXT, Source, left_out_of
from dstrain.graph import Input


def dataset_line(source: Source, dataset: Dataset) -> str:
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


def left_out_lines(source: Source, inputs: Mapping[str, Input]) -> list[str]:
    """Say what is in a folder with captions and is not read.

    inputs: The variant's table of inputs.
    """
    if source.form != "folder":
        return []
    return [f"{source.path}: {line}" for line in left_out_of(source.path, inputs)]


def short_clips(dataset: Dataset, lengths: Sequence[int]) -> list[str]:
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
