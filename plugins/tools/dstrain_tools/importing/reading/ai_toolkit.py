"""Read a job of ai-toolkit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import UsageError

from dstrain_tools.importing.entries import Entry, Outcome, Result, Source
from dstrain_tools.importing.reading.data_files import leaves, merged, table_list


def read_job(path: Path, data: Mapping[str, Any]) -> Source:
    """Return what the first process of a job says."""
    run: list[Entry] = []
    apart: list[Outcome] = []
    config = data.get("config")
    if not isinstance(config, Mapping):
        raise UsageError(path, "has no table config, as files of ai-toolkit have")
    for key, value in data.items():
        if key == "meta":
            run += leaves(path, "meta", value)
        elif key != "config":
            run.append(Entry(key, value, f"{path.name}: {key}"))
    for key, value in config.items():
        if key != "process":
            run.append(Entry(f"config.{key}", value, f"{path.name}: config.{key}"))
    processes = table_list(path, "process", config)
    if not processes:
        raise UsageError(path, "has no process: expected a list under config")
    for number in range(2, len(processes) + 1):
        why = "a run of its own: put it into a file of its own"
        place = f"{path.name}: config.process[{number}]"
        apart.append(Outcome.at(place, Result(lost=why)))
    process = processes[0]
    datasets = [
        leaves(path, f"datasets[{number}]", one, "")
        for number, one in enumerate(table_list(path, "datasets", process), 1)
    ]
    for key, value in process.items():
        if key == "trigger_word" and value is not None and datasets:
            shared = Entry(key, value, f"{path.name}: {key}")
            with_word = [merged([shared], own) for own in datasets]
            if not any(shared in own for own in with_word):
                why = "each dataset says otherwise"
                apart.append(Outcome(shared, Result(note=why)))
            datasets = with_word
        elif key == "network" and value is None:
            empty = Entry(key, value, f"{path.name}: {key}")
            why = "without a network the weights themselves are trained"
            apart.append(Outcome(empty, Result(note=why)))
        elif key != "datasets":
            run += leaves(path, key, value)
    return Source("ai-toolkit", run, datasets, files=[path], apart=apart)
