"""What a dry run says of each row, as JSON data."""

from collections.abc import Iterator, Mapping
from typing import Any

from dstrain.data import Cell, Dataset
from dstrain.pipeline import MASK
from dstrain.runs.datasets.sizes import group_sizes
from dstrain.runs.setup import Setup


def row_data(setup: Setup, dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield each sample of a dataset with its files, texts and size, then the rows that are
    skipped, each with its fault.
    """
    sizes = group_sizes(dataset)
    for index in dataset.first_variants.tolist():
        row, chunk = dataset.sample_ids[index].tolist()
        cells = dataset.rows[index]
        group = sizes[int(dataset.groups[index])]
        yield {
            "row": setup.name_row(row),
            "sample": chunk,
            "files": {name: list(one.files) for name, one in _files(cells)},
            "values": {
                name: one.literal for name, one in cells.items() if not one.files
            },
            "sizes": {name: one.shapes for name, one in _files(cells)},
            "bucket": group.size,
            "cropped": round(group.cropped, 4),
            "repeats": setup.config.dataset_repeat,
            "has_mask": MASK in cells,
        }
    for fault in dataset.skipped:
        place = setup.in_words(dataset.table.where(fault.row, fault.column))
        yield {"row": place, "fault": fault.reason}


def _files(cells: Mapping[str, Cell]) -> Iterator[tuple[str, Cell]]:
    return ((name, cell) for name, cell in cells.items() if cell.files)
