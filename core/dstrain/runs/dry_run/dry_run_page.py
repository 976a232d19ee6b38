"""What a dry run says, as text and as JSON."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.cache import is_cache
from dstrain.console import fitted, number_of, redacted
from dstrain.data import Cell, Dataset
from dstrain.pipeline import MASK
from dstrain.registry import Section
from dstrain.runs.build import total_steps, without_effect
from dstrain.runs.datasets.sizes import group_sizes, size_lines
from dstrain.runs.dry_run.planned_rows import PlannedRows
from dstrain.runs.launch.variables import world_size
from dstrain.runs.setup import Setup


@dataclass(frozen=True)
class RunLength:
    """How long a run is."""

    rows: PlannedRows
    samples_per_step: int
    per_epoch: int | None
    """Steps of an epoch; where files were not decoded, as if each row was one sample."""
    steps: int | None
    is_exact: bool
    """Whether the steps are known exactly."""

    @classmethod
    def of(cls, setup: Setup, rows: PlannedRows) -> "RunLength":
        """Return that of a run with these rows."""
        config = setup.config
        processes = world_size(os.environ)
        batch = config.batch_size * config.gradient_accumulation_steps * processes
        per_epoch = rows.steps_per_epoch
        is_exact = per_epoch is not None
        if per_epoch is None and rows.count:
            trained = rows.count - rows.held_out
            per_epoch = math.ceil(trained * config.dataset_repeat / batch)
        steps = config.max_steps
        if per_epoch is not None:
            steps = total_steps(config, per_epoch)
        return cls(rows, batch, per_epoch, steps, is_exact)

    def lines(self, setup: Setup, second: Sequence[PlannedRows]) -> Iterator[str]:
        """Yield rows and steps."""
        rows = self.rows
        if rows.place is not None:
            yield f"    {rows.in_words()} x {setup.config.dataset_repeat}"
        if rows.held_out:
            yield f"    {rows.held_out} of these for validation"
        for one in second:
            yield f"    {one.in_words()} for validation"
        is_stage_1 = setup.stage == "data_process"
        batch = None if is_stage_1 else self.samples_per_step
        for line in size_lines(rows.sizes, batch):
            yield f"    {line}"
        if setup.config.runs_both_stages:
            yield f"    {_work(setup, [rows, *second])}"
        if is_stage_1:
            return
        yield f"    samples per step: {self.samples_per_step}"
        steps = number_of(self.steps or 0, "step")
        if self.is_exact:
            yield f"    {steps}"
        elif rows.count:
            yield f"    {steps}, if each row is one sample and all have the same size"
        most = max((one.samples for one in rows.sizes), default=0)
        if self.steps:
            for line in without_effect(
                setup.config, self.steps, self.samples_per_step, most
            ):
                yield f"    {line}"


@dataclass(frozen=True)
class DryRun:
    """What a dry run says."""

    setup: Setup
    datasets: Sequence[PlannedRows]
    """The dataset, and the second one for validation if there is one."""
    length: RunLength
    sections: Sequence[Section]
    """What plugins say."""
    absent: Sequence[str]
    """Files that are not on this machine."""

    def page(self) -> str:
        """Return it as text."""
        length = self.length.lines(self.setup, self.datasets[1:])
        lines = ["", *fitted(["this run", *length])]
        for section in self.sections:
            lines += [] if section.is_answer else section.page()
        if self.absent:
            missing = [f"    {line}" for line in self.absent]
            lines += ["", "to fetch", *fitted(missing)]
        # What a reader looks for comes last, where it is on the screen.
        for section in self.sections:
            lines += section.page() if section.is_answer else []
        return redacted("\n".join(lines) + "\n")

    def as_json(self) -> Iterator[str]:
        """Yield it as JSON objects: rows, buckets, steps, files, and what plugins say."""
        for one in self._as_data():
            yield redacted(json.dumps(one, ensure_ascii=False))

    def _as_data(self) -> Iterator[dict[str, Any]]:
        for setup, rows in zip(self.setup.datasets, self.datasets, strict=True):
            if rows.dataset is not None:
                yield from _row_data(setup, rows.dataset)
        length = self.length
        for size, samples, cropped in self.datasets[0].sizes:
            yield {"bucket": size, "samples": samples, "cropped": round(cropped, 4)}
        yield {
            "rows": self.datasets[0].count,
            "held_out": self.datasets[0].held_out,
            "samples_per_step": length.samples_per_step,
            "steps_per_epoch": length.per_epoch,
            "steps": length.steps,
            "is_exact": length.is_exact,
        }
        for line in self.absent:
            yield {"to_fetch": line}
        for section in self.sections:
            yield {"section": section.title, **section.data}


def _row_data(setup: Setup, dataset: Dataset) -> Iterator[dict[str, Any]]:
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


def _work(setup: Setup, datasets: Sequence[PlannedRows]) -> str:
    """Say how many rows stage 1 computes before stage 2 trains."""
    cache = setup.cache_path
    if all(rows.is_cached for rows in datasets):
        return f"stage 1 computes nothing: {cache} has the values of all rows"
    count = number_of(sum(rows.count for rows in datasets), "row")
    if is_cache(cache):
        return f"stage 1 computes what {cache} lacks of {count}"
    return f"stage 1 computes {count} into {cache}"
