"""A dataset: its samples, whose cells load when they are used."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.cells import Cell
from dstrain.data.table import EMBEDDED, Fault, Spooled, Table, is_embedded_file
from dstrain.errors import UsageError
from dstrain.graph import Column
from dstrain.storage import Chosen

MOST_FORMS = 2**12
"""Forms that are kept in RAM; those of videos may differ from clip to clip."""

Form = tuple[str, str, tuple[tuple[str, Any], ...]]
"""The input of a cell, its kind and its parameters, which many cells have in common."""


class SampleCells(Spooled[Mapping[str, Cell]]):
    """The cells of each sample by input."""

    def __init__(self) -> None:
        """Begin without samples."""
        super().__init__()
        self._forms: list[Form] = []
        self._numbers: dict[Form, int] = {}

    def append(self, cells: Mapping[str, Cell]) -> None:
        """Add a sample."""
        entries: list[tuple[Any, ...]] = []
        for name, cell in cells.items():
            form = self._number((name, cell.kind, cell.parameters))
            if cell.files:
                entries.append((form, cell.files, cell.marks, cell.folder))
            else:
                entries.append((form, cell.literal))
        self.entries.append(entries)

    def _number(self, form: Form) -> int | Form:
        number = self._numbers.get(form)
        if number is None:
            if len(self._forms) == MOST_FORMS:
                return form
            number = self._numbers[form] = len(self._forms)
            self._forms.append(form)
        return number

    def _made(self, entry: list[Any]) -> dict[str, Cell]:
        cells: dict[str, Cell] = {}
        for form, *content in entry:
            is_known = isinstance(form, int)
            name, kind, parameters = self._forms[form] if is_known else _tuples(form)
            if len(content) == 1:
                cells[name] = Cell(kind, content[0], (), parameters)
            else:
                files, marks, folder = content
                cells[name] = Cell(
                    kind, None, tuple(files), parameters, tuple(marks), folder
                )
        return cells


def _tuples(value: Any) -> Any:
    """Return tuples in the place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


TEXT_BYTES = tuple(int(64 * 1.5**power) for power in range(40))
"""Most bytes (UTF-8) of the texts of a row in each class of lengths.

Batches of 8 with prompts of 5 to 194 words are then 12 % padding instead of 42 %, and 1,000
rows are 4 batches more; below the first class prompts are shorter than images.
"""

SampleIds = np.ndarray[Any, np.dtype[np.int64]]
Groups = np.ndarray[Any, np.dtype[np.int32]]
Signature = frozenset[tuple[str, Any]]
"""What the samples of a batch have in common."""


Variant = tuple[int, Mapping[str, Cell]]
"""How probable a variant is, in proportion to the others of its sample, and its cells."""


@dataclass(frozen=True, slots=True)
class CheckedSample:
    """A sample before it is part of a dataset."""

    sample_id: tuple[int, int]
    """Its row and chunk."""
    variants: Sequence[Variant]
    """All of the same inputs and sizes; validation takes the first."""
    cropped: float = 0.0
    """Share of its image that is cut off."""


@dataclass(frozen=True)
class Dataset:
    """Checked samples.

    A row with a video gives one sample for each of its clips, any other row gives one;
    of several resolutions each gives them. A sample has one variant or several, of which
    each draw takes one: they follow each other, with the same row and chunk.
    """

    table: Table
    rows: Sequence[Mapping[str, Cell]]
    """The cells of each variant by input, without inputs that are absent; made when they
    are used.
    """
    sample_ids: SampleIds
    """(row, chunk) of each variant, (variants, 2): rows of the table and samples of a
    row, from 0.
    """
    columns: Mapping[str, Column]
    """Input -> the column it is read from."""
    groups: Groups
    """The number of the signature of each variant, the same for all of a sample."""
    signatures: Sequence[Signature]
    """The signatures of the samples, in the order of the first that has them."""
    weights: SampleIds
    """How probable each variant is, in proportion to the others of its sample."""
    cropped: Sequence[float]
    """Mean share that is cut off the images of the samples of each signature."""
    skipped: Sequence[Fault] = ()
    """Why rows of the table give no sample."""
    parts: Sequence[tuple[int, Mapping[str, Column]]] = ()
    """The first row and the columns of each of several datasets."""

    @classmethod
    def of(
        cls,
        table: Table,
        samples: Iterable[CheckedSample],
        columns: Mapping[str, Column],
        pads_texts: bool = False,
    ) -> "Dataset":
        """Return the dataset of samples.

        pads_texts: Whether a batch pads what is computed from texts to the longest
            of it.
        """
        rows = SampleCells()
        sample_ids = array("q")
        groups = array("i")
        weights = array("q")
        numbers: dict[Signature, int] = {}
        counts: list[int] = []
        cropped: list[float] = []
        for sample in samples:
            cells = [cells for _, cells in sample.variants]
            common = signature_of(cells, columns, pads_texts)
            group = numbers.setdefault(common, len(numbers))
            if group == len(counts):
                counts.append(0)
                cropped.append(0.0)
            counts[group] += 1
            cropped[group] += sample.cropped
            for weight, variant in sample.variants:
                rows.append(variant)
                sample_ids.extend(sample.sample_id)
                groups.append(group)
                weights.append(weight)
        return cls(
            table,
            rows,
            np.array(sample_ids, np.int64).reshape(-1, 2),
            columns,
            np.array(groups, np.int32),
            tuple(numbers),
            np.array(weights, np.int64),
            [total / count for total, count in zip(cropped, counts, strict=True)],
        )

    @cached_property
    def first_variants(self) -> SampleIds:
        """Return the number of the first variant of each sample."""
        return first_variants(self.sample_ids)

    @property
    def input_sets(self) -> tuple[frozenset[str], ...]:
        """Return the sets of inputs that samples have."""
        return tuple(dict.fromkeys(map(inputs_of, self.signatures)))

    @property
    def unused_columns(self) -> tuple[str, ...]:
        """Return the columns that no input is read from."""
        used = {column.name for column in self.columns.values()}
        return tuple(name for name in self.table.columns if name not in used)

    def signature(self, sample: int) -> Signature:
        """Return what a sample has in common with the others of its batch."""
        return self.signatures[int(self.groups[sample])]

    def fault(self, row: int, name: str, error: UsageError) -> Fault:
        """Return the fault of an input that could not be loaded."""
        columns = self.columns
        # Several datasets may have masks in columns of different names.
        for first, own in self.parts:
            if first <= row:
                columns = own
        is_named = not is_embedded_file(error.where)
        file = repr(Path(error.where).name) if is_named else EMBEDDED
        return Fault(row, columns[name].name, f"{file} {error.what}")

    def damage(self, row: int, name: str, error: UsageError) -> UsageError:
        """Return the error of an input that could not be loaded, with its place in the
        metadata.
        """
        if row >= len(self.table.rows):  # a sample that no row gives
            return error
        fault = self.fault(row, name, error)
        place = self.table.where(row, fault.column)
        return UsageError(place, fault.reason, *error.help_lines)

    @contextmanager
    def errors_at(self, row: int) -> Iterator[None]:
        """Name the row in a UsageError of the block."""
        try:
            yield
        except UsageError as error:
            if row >= len(self.table.rows):  # a sample that no row gives
                raise
            raise error.at([self.table.where(row)]) from error

    def without(self, faults: Iterable[Fault]) -> "Dataset":
        """Return the dataset without the rows that have faults.

        Raises UsageError with all faults if no row is left.
        """
        unique = dict.fromkeys([*self.skipped, *faults])
        skipped = sorted(unique, key=lambda fault: fault.row)
        bad = [fault.row for fault in skipped]
        kept = np.flatnonzero(~np.isin(self.sample_ids[:, 0], bad))
        if not len(kept):
            self.table.refuse(skipped)
        if len(kept) == len(self.rows):
            return replace(self, skipped=skipped)
        # Renumbered in the order of the first sample of each.
        old, first, groups = np.unique(
            self.groups[kept], return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        return replace(
            self,
            rows=Chosen(self.rows, kept),
            sample_ids=self.sample_ids[kept],
            groups=np.argsort(order)[groups].astype(np.int32),
            signatures=tuple(self.signatures[number] for number in old[order]),
            weights=self.weights[kept],
            cropped=tuple(self.cropped[number] for number in old[order]),
            skipped=skipped,
        )


def first_variants(sample_ids: SampleIds) -> SampleIds:
    """Return the number of the first variant of each sample, given row and chunk of all
    variants in order.
    """
    is_other = (np.diff(sample_ids, axis=0) != 0).any(axis=1)
    return np.flatnonzero(np.concatenate([[True], is_other])[: len(sample_ids)])


def signature_of(
    variants: Sequence[Mapping[str, Cell]],
    columns: Mapping[str, Column],
    pads_texts: bool,
) -> Signature:
    """Return what the samples of a batch have in common: the inputs, the sizes of their
    files, the values that must be equal, and, where batches are padded, about how long
    their texts are.

    variants: The cells of each variant of a sample; the longest text counts.
    """
    common: dict[str, Any] = {}
    for name, cell in variants[0].items():
        column = columns.get(name)
        is_same = column is not None and column.same_in_batch
        common[name] = cell.literal if is_same else cell.shapes
    if pads_texts:
        # No input has this name.
        texts = ("".join(_texts(cells, columns)) for cells in variants)
        most = max(len(text.encode()) for text in texts)
        common[""] = bisect_left(TEXT_BYTES, most)
    return frozenset(common.items())


def _texts(cells: Mapping[str, Cell], columns: Mapping[str, Column]) -> Iterator[str]:
    """Yield the texts of a sample."""
    for name, cell in cells.items():
        column = columns.get(name)
        if column is not None and column.kind == "text":
            yield cell.literal
        elif column is not None and column.kind == "texts":
            yield from cell.literal


def inputs_of(common: Signature) -> frozenset[str]:
    """Return the inputs of the samples of a signature."""
    return frozenset(name for name, _ in common if name)
