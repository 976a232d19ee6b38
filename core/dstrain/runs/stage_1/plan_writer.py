"""Write the plan file that stage 2 trains from."""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.cache import CacheInfo
from dstrain.cache.backend import plan_files
from dstrain.cache.source_files import names_digest
from dstrain.console import counted, redacted
from dstrain.data.files import real_path
from dstrain.graph import serialize
from dstrain.models.component_files import named_models
from dstrain.runs.datasets.sizes import group_sizes
from dstrain.runs.datasets.sources import (
    dataset_folders,
    dataset_source,
    folders_of_parts,
)
from dstrain.runs.plan_identity import plan_identity
from dstrain.runs.prompt_rows import row_line
from dstrain.runs.setup import Setup
from dstrain.runs.stage_1.keyed_samples import KeyedSample, KeyedSamples
from dstrain.runs.stage_1.unchanged import as_repeatable
from dstrain.storage.hashing import files_in


def write_plan(setup: Setup, keyed: KeyedSamples, words: Sequence[str]) -> None:
    """Commit the plan that stage 2 trains from; the words of the command are recorded."""
    table = setup.dataset.table
    count = len(setup.dataset.rows)
    samples = keyed.samples[:count]
    input_sets = setup.dataset.input_sets
    dataset: dict[str, Any] = {
        "path": redacted(str(table.path.resolve())),
        "sha256": setup.dataset_digest,
        "rows": len(table.rows),
        "folders": [redacted(folder) for folder in dataset_folders(setup.config)],
    }
    source = dataset_source(setup.config)
    if source is not None and source.form != "table":
        dataset["form"] = source.form
    if len(setup.parts) > 1:
        dataset["parts"] = part_records(setup)
    info = CacheInfo(
        dataset=dataset,
        columns=table.columns,
        inputs=[sorted(inputs) for inputs in input_sets],
        components=keyed.components,
        configs=keyed.found.configs,
        models=named_models(setup.family, setup.models),
        files={
            name: [
                (
                    redacted(os.path.abspath(file)),
                    place,
                    keyed.model_digests.record(file),
                )
                for place, file in files_in(files.paths)
            ]
            for name, files in keyed.found.files.items()
        },
        versions=setup.versions,
        sizes=group_sizes(setup.dataset),
        repeatable=as_repeatable(setup, source, keyed.digests, keyed.model_digests),
        prompt_rows=[
            row_line(row, sample.addresses)
            for row, sample in zip(
                keyed.samples.prompt_rows, keyed.samples[count:], strict=True
            )
        ],
        config={"folder": redacted(os.getcwd()), "words": list(words)},
    )
    lines = plan_lines(setup, keyed, samples, input_sets)
    identity = plan_identity(setup, input_sets, keyed.found.configs)
    plan_files.write_plan(setup.cache_path, identity, asdict(info), lines)


def part_records(setup: Setup) -> list[dict[str, Any]]:
    """Return what a plan records of each dataset of a run."""
    records = []
    for part in setup.parts:
        table = part.setup.checked_dataset.table
        record = {
            "path": redacted(str(table.path.resolve())),
            "rows": len(table.rows),
            "sha256": part.setup.dataset_digest,
        }
        form = part.setup.data_config.source.form
        if form != "table":
            record["form"] = form
        records.append(record)
    return records


def plan_lines(
    setup: Setup,
    keyed: KeyedSamples,
    samples: Sequence[KeyedSample],
    input_sets: Sequence[frozenset[str]],
) -> Iterator[dict[str, Any]]:
    """Yield what a plan has of each sample; `inputs` and `group` number the
    set of inputs and the signature. A file is recorded with the first sample that uses it
    of each dataset: stage 2 need not name all of these.
    """
    folders_by_part = folders_of_parts(setup.config)
    counts = (len(part.setup.checked_dataset.table.rows) for part in setup.parts)
    ends = list(accumulate(counts))
    # A byte for each file, not its name.
    is_recorded = np.zeros((len(ends), len(keyed.digests)), np.bool_)
    seen_folders: list[set[str]] = [{""} for _ in ends]
    with_progress = counted("write plan", samples, len(samples))
    weights = setup.dataset.weights
    for sample, group, weight in zip(
        with_progress, setup.dataset.groups, weights, strict=True
    ):
        row, chunk = sample.sample_id
        part = bisect_right(ends, row)
        folders = folders_by_part[part]
        values = {
            name: serialize(sample.cells[name].literal, {}, name)
            for name in sample.plan.cached_values
            if name not in sample.addresses
        }
        for name, address in sample.addresses.items():
            values[name] = {"at": address}
        files = []
        frame_folders = []
        for name in sorted(sample.plan.used_inputs):
            cell = sample.cells[name]
            for file in cell.files:
                number = keyed.digests.number(file)
                if not is_recorded[part, number]:
                    is_recorded[part, number] = True
                    files.append((name_in(folders, file), keyed.digests.record(file)))
            if cell.folder not in seen_folders[part]:
                seen_folders[part].add(cell.folder)
                place = name_in(folders, cell.folder)
                frame_folders.append((place, names_digest(Path(cell.folder))))
        yield {
            "row": row,
            "line": int(setup.dataset.table.lines[row]),
            "chunk": chunk,
            "inputs": input_sets.index(sample.plan.inputs),
            "group": int(group),
            "weight": int(weight),
            "values": values,
            "files": files,
            "frame folders": frame_folders,
        }


def name_in(folders: Sequence[str], path: str) -> str:
    """Return a file's name in one of the folders, under which it is found when they moved."""
    # An absolute name in the metadata may lead through links, or upwards, to a folder.
    # Looked up only then: each look-up takes time, and may fail.
    for find in (str, real_path):
        place = find(path)
        for folder in folders:
            start = os.path.join(folder, "")
            if place.startswith(start) and ".." not in Path(place).parts:
                # As every platform reads it: a cache may be moved to another one.
                return place.removeprefix(start).replace(os.sep, "/")
    return path
