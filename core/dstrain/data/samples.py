"""The cells of a dataset's samples, kept on disk in few bytes each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from dstrain.data.cells import Cell
from dstrain.storage import Chosen
from dstrain.storage.spool import Spool

MOST_FORMS = 2**12
"""Forms that are kept in RAM; those of videos may differ from clip to clip."""

Form = tuple[str, str, tuple[tuple[str, Any], ...]]
"""The input of a cell, its kind and its parameters, which many cells have in common."""


class SampleCells(Sequence[Mapping[str, Cell]]):
    """The cells of each sample by input, of which only those looked at are objects."""

    def __init__(self) -> None:
        """Begin without samples."""
        self._forms: list[Form] = []
        self._numbers: dict[Form, int] = {}
        self._entries = Spool()

    def append(self, cells: Mapping[str, Cell]) -> None:
        """Add a sample."""
        entries: list[tuple[Any, ...]] = []
        for name, cell in cells.items():
            form = self._number((name, cell.kind, cell.parameters))
            if cell.files:
                entries.append((form, cell.files, cell.marks, cell.folder))
            else:
                entries.append((form, cell.literal))
        self._entries.append(entries)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Cell]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Cell]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return the cells of a sample, or those of a slice of the samples."""
        if isinstance(index, slice):
            return Chosen(self, range(len(self))[index])
        return self._cells(self._entries[index])

    def __iter__(self) -> Iterator[Mapping[str, Cell]]:
        """Yield the cells of the samples in order."""
        return map(self._cells, self._entries)

    def _number(self, form: Form) -> int | Form:
        number = self._numbers.get(form)
        if number is None:
            if len(self._forms) == MOST_FORMS:
                return form
            number = self._numbers[form] = len(self._forms)
            self._forms.append(form)
        return number

    def _cells(self, entries: list[Any]) -> dict[str, Cell]:
        cells: dict[str, Cell] = {}
        for form, *content in entries:
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
