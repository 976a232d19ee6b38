"""A dataset: its samples, whose cells load when they are used."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dstrain.data.cells import Cell
from dstrain.data.metadata import Fault, Table
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column


@dataclass(frozen=True)
class Dataset:
    """Checked samples.

    A row with a video gives one sample for each of its clips, any other row gives one.
    """

    table: Table
    rows: Sequence[Mapping[str, Cell]]
    """The cells of each sample by input, without inputs that are absent."""
    sample_ids: tuple[tuple[int, int], ...]
    """(row, chunk) of each sample: rows of the table and clips of a row, from 0."""
    columns: Mapping[str, Column]
    """Input -> the column it is read from."""
    skipped: Sequence[Fault] = ()
    """Why rows of the table give no sample."""

    @property
    def unused_columns(self) -> tuple[str, ...]:
        """Return the columns that no input is read from."""
        used = {column.name for column in self.columns.values()}
        return tuple(name for name in self.table.columns if name not in used)

    def signature(self, sample: int) -> frozenset[tuple[str, Any]]:
        """Return what the samples of a batch have in common: the inputs, the sizes of
        their files, and the values that must be equal.
        """
        common: dict[str, Any] = {}
        for name, cell in self.rows[sample].items():
            column = self.columns.get(name)
            is_same = column is not None and column.same_in_batch
            common[name] = cell.literal if is_same else cell.shapes
        return frozenset(common.items())

    @cached_property
    def groups(self) -> list[int]:
        """Return the number of each sample's signature."""
        numbers: dict[Any, int] = {}
        signatures = map(self.signature, range(len(self.rows)))
        return [numbers.setdefault(one, len(numbers)) for one in signatures]

    def fault(
        self,
        row: int,
        name: str,
        error: UsageError,
    ) -> Fault:
        """Return the fault of an input that could not be loaded."""
        reason = f"{Path(error.where).name!r} {error.what}"
        return Fault(row, self.columns[name].name, reason)

    def damage(
        self,
        row: int,
        name: str,
        error: UsageError,
    ) -> UsageError:
        """Return the error of an input that could not be loaded, with its place in the
        metadata.
        """
        if row >= len(self.table.rows):  # a sample that no row gives, as of previews
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
            if row >= len(self.table.rows):  # of a preview
                raise
            raise error.at([self.table.where(row)]) from error

    def without(self, faults: Iterable[Fault]) -> "Dataset":
        """Return the dataset without the rows that have faults.

        Raises UsageError with all faults if no row is left.
        """
        unique = dict.fromkeys([*self.skipped, *faults])
        skipped = sorted(unique, key=lambda fault: fault.row)
        bad = {fault.row for fault in skipped}
        kept = [i for i, (row, _) in enumerate(self.sample_ids) if row not in bad]
        if not kept:
            self.table.refuse(skipped)
        return replace(
            self,
            rows=[self.rows[i] for i in kept],
            sample_ids=tuple(self.sample_ids[i] for i in kept),
            skipped=skipped,
        )
