"""Read the datasets of musubi-tuner and sd-scripts: in a file of their own, or in the run's keys."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.plugin import UsageError

from dstrain_tools.importing.entries import Entry, Outcome, Result, Source
from dstrain_tools.importing.reading.data_files import (
    beside,
    flat_table,
    merged,
    read_data,
    table_list,
)
from dstrain_tools.importing.tables import Table, table_of

DATASET = "dataset_config"
"""The flag of musubi-tuner and sd-scripts that names the file of datasets."""
CLASS_FOLDERS = ("train_data_dir", "reg_data_dir")


def with_datasets(source: Source, path: Path, dataset: Path | None) -> Source:
    """Return the source with the datasets of its file of datasets, or with one of its
    own keys.
    """
    named = {entry.key: entry for entry in source.run}.get(DATASET)
    run = [entry for entry in source.run if entry.key != DATASET]
    table = table_of(source.tool)
    # What a command says of images holds for all datasets.
    general = [entry for entry in run if _is_of_datasets(entry, table)]
    run = [entry for entry in run if entry not in general]
    if dataset is None and named is not None:
        dataset = beside(path, Path(str(named.value)))
        if dataset is None:
            what = f"names {named.value}, which is not here: it has the datasets"
            raise UsageError(path, what, "give the file with --dataset FILE")
    if dataset is None:
        folders = [
            entry for entry in general if entry.key in CLASS_FOLDERS and entry.value
        ]
        shared = [entry for entry in general if entry not in folders]
        parts = [part for folder in folders for part in _class_folders(folder)]
        own = [merged(shared, part) for part in parts]
        return replace(source, run=run, datasets=own or ([shared] if shared else []))
    data = read_data(dataset)
    entries, datasets = _datasets_of(dataset, data, general)
    files = [*source.files, dataset]
    apart = [*source.apart, *_overruled(dataset, data, general, datasets)]
    if named is not None:
        apart.append(Outcome(named, Result(note=f"is read: {dataset}")))
    return replace(
        source, run=[*run, *entries], datasets=datasets, files=files, apart=apart
    )


def _class_folders(folder: Entry) -> list[list[Entry]]:
    """Return the datasets of sd-scripts' layout: a folder `10_dog` is drawn ten times,
    and its name is the caption of images without one.
    """
    path = Path(str(folder.value))
    found = []
    for one in sorted(path.iterdir()) if path.is_dir() else ():
        match = re.fullmatch(r"(\d+)_(.+)", one.name)
        if match is None or not one.is_dir():
            continue
        place = f"{folder.place}: folder {one.name}"
        found.append(
            [
                replace(folder, value=str(one)),
                Entry("num_repeats", int(match[1]), f"{place}, repeats"),
                Entry("class_tokens", match[2].replace("_", " "), f"{place}, caption"),
            ]
        )
    return found or [[folder]]


def _is_of_datasets(entry: Entry, table: Table) -> bool:
    is_of_run = table.run.rule(entry.key) or entry.key in table.run.missing
    return not is_of_run and entry.key in (
        *table.dataset.carried,
        *table.dataset.needless,
        *table.dataset.missing,
    )


def _datasets_of(
    path: Path, data: Mapping[str, Any], general: Sequence[Entry]
) -> tuple[list[Entry], list[list[Entry]]]:
    """Return the keys that are of no dataset, and those of each dataset: what holds for
    several comes first, and is left out where a dataset has its own.
    """
    others = [
        Entry(key, value, f"{path.name}: {key}")
        for key, value in data.items()
        if key not in ("general", "datasets")
    ]
    own = flat_table(path, "general", data.get("general") or {})
    shared = merged(general, own)
    datasets = []
    for number, table in enumerate(table_list(path, "datasets", data), 1):
        place = f"datasets[{number}]"
        rest = {key: value for key, value in table.items() if key != "subsets"}
        own = merged(shared, flat_table(path, place, rest))
        if "subsets" not in table:
            datasets.append(own)
        for index, subset in enumerate(table_list(path, "subsets", table), 1):
            entries = flat_table(path, f"{place}.subsets[{index}]", subset)
            datasets.append(merged(own, entries))
    return others, datasets


def _overruled(
    path: Path,
    data: Mapping[str, Any],
    general: Sequence[Entry],
    datasets: Sequence[Sequence[Entry]],
) -> list[Outcome]:
    """Return what holds for several datasets, each of which has its own."""
    found = []
    tables = [("general", data.get("general") or {})]
    for number, table in enumerate(table_list(path, "datasets", data), 1):
        rest = {key: value for key, value in table.items() if key != "subsets"}
        tables.append((f"datasets[{number}]", rest))
    entries = [one for place, own in tables for one in flat_table(path, place, own)]
    used = {entry.place for own in datasets for entry in own}
    for entry in (*general, *entries):
        if entry.place not in used:
            why = "each dataset says otherwise" if datasets else "there are no datasets"
            found.append(Outcome(entry, Result(note=why)))
    return found
