"""Several datasets as one: the rows of the second follow those of the first, and so on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from dstrain.data.dataset import Dataset, Signature
from dstrain.data.table import Table
from dstrain.data.tables.form import Source
from dstrain.storage import hash_json
from dstrain.storage.lazy_sequences import Joined


def join_sources(sources: Sequence[Source]) -> Source:
    """Return where the rows of several datasets are, or of the only entry of --dataset: it
    has the same digest as `join_datasets` of it.
    """
    first = sources[0]
    return Source("several", first.path, first.base, parts=tuple(sources))


@dataclass(frozen=True)
class _Places:
    """Names the rows of several tables."""

    tables: Sequence[Table]
    first: Sequence[int]

    def __call__(self, row: int, column: str) -> str:
        part = int(np.searchsorted(self.first, row, "right")) - 1
        return self.tables[part].where(row - self.first[part], column)


def join_datasets(datasets: Sequence[Dataset], digests: Sequence[str]) -> Dataset:
    """Return several datasets as one.

    digests: What identifies the rows of each.
    """
    tables = [one.table for one in datasets]
    # The number of the first row of each.
    first = list(accumulate((len(one.rows) for one in tables[:-1]), initial=0))
    columns = {name: column for one in datasets for name, column in one.columns.items()}
    signatures: dict[Signature, int] = {}
    cropped: dict[int, float] = {}
    counts: dict[int, int] = {}
    groups = []
    sample_ids = []
    for one, row in zip(datasets, first, strict=True):
        numbers = [
            signatures.setdefault(common, len(signatures)) for common in one.signatures
        ]
        own_counts = np.bincount(one.groups[one.first_variants], minlength=len(numbers))
        for number, count, share in zip(
            numbers, own_counts.tolist(), one.cropped, strict=True
        ):
            counts[number] = counts.get(number, 0) + count
            cropped[number] = cropped.get(number, 0.0) + count * share
        groups.append(np.array(numbers, np.int32)[one.groups])
        sample_ids.append(one.sample_ids + np.array([row, 0]))
    return Dataset(
        _join_tables(tables, first, digests),
        Joined([one.rows for one in datasets]),
        np.concatenate(sample_ids),
        columns,
        np.concatenate(groups),
        tuple(signatures),
        np.concatenate([one.weights for one in datasets]),
        [cropped[number] / max(counts[number], 1) for number in range(len(signatures))],
        [
            replace(fault, row=fault.row + row)
            for one, row in zip(datasets, first, strict=True)
            for fault in one.skipped
        ],
        [(row, one.columns) for one, row in zip(datasets, first, strict=True)],
    )


def _join_tables(
    tables: Sequence[Table], first: Sequence[int], digests: Sequence[str]
) -> Table:
    columns: Mapping[str, None] = dict.fromkeys(
        name for table in tables for name in table.columns
    )
    return Table(
        tables[0].path,
        tuple(columns),
        Joined([table.rows for table in tables]),
        np.concatenate([np.asarray(table.lines, np.int64) for table in tables]),
        name_place=_Places(tables, first),
        digest=hash_json("datasets", list(digests)),
        form="several",
        roots=tuple(dict.fromkeys(root for table in tables for root in table.roots)),
    )
