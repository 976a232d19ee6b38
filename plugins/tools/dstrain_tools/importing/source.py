"""Read a configuration of another tool, and tell whose it is by its keys."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from dstrain.errors import UsageError
from dstrain.storage.files import read_limited

from dstrain_tools.importing.entries import Entry, Outcome, Result, Source
from dstrain_tools.importing.shell import (
    BATCH_VARIABLE,
    VARIABLE,
    Command,
    Script,
    read_script,
)
from dstrain_tools.importing.tables import TOOLS, Table, table_of

SCRIPTS = (".sh", ".bash", ".bat", ".ps1", ".txt", ".cmd", "")
DIFFSYNTH_SCRIPT = "model_training"
OF_DIFFUSERS = ("train_dreambooth", "train_text_to_image", "train_control_lora")
"""How names of diffusers' scripts begin."""
MUSUBI_KEYS = ("dit", "task", "model_version", "t5", "clip")
KOHYA_KEYS = (
    "pretrained_model_name_or_path",
    "ae",
    "clip_l",
    "t5xxl",
    "train_data_dir",
)
MUSUBI_DATASET_KEYS = (
    *("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file"),
)
CLASS_FOLDERS = ("train_data_dir", "reg_data_dir")
WITH_DATASETS = ("ai-toolkit", "diffsynth")
"""Tools without a separate file of datasets."""
DATASET = "dataset_config"
"""The flag of musubi-tuner and sd-scripts that names the file of datasets."""
ARGUMENTS = "config_file"
"""Their flag that names a file of flags."""


def read_source(
    path: Path, dataset: Path | None, tool: str | None, number: int | None
) -> Source:
    """Return what a file says.

    Raises UsageError for one that cannot be read, or whose tool cannot be told.

    Args:
        path: A TOML, YAML or JSON file, or a shell script.
        dataset: The tool's separate file of datasets, if the first does not name it.
        tool: Whose it is; told by its keys if None.
        number: Which of a script's training commands is meant, from 1.
    """
    suffix = path.suffix.lower()
    if suffix in SCRIPTS:
        return _of_script(path, dataset, tool, number)
    if number is not None:
        raise UsageError("--command", f"has no effect: {path} is no shell script")
    data = read_data(path)
    tool = tool or _tool_of(data, path)
    has_datasets = "datasets" in data or "general" in data
    if dataset is not None and (tool in WITH_DATASETS or has_datasets):
        what = f"has no effect: {path} has its datasets in it"
        raise UsageError("--dataset", what)
    if tool == "ai-toolkit":
        return _of_ai_toolkit(path, data)
    if tool == "diffsynth":
        return Source(tool, _flat(path, data), files=[path])
    if has_datasets:
        return _with_datasets(Source(tool, (), files=[]), path, path)
    source = Source(tool, _without_sections(path, data), files=[path])
    return _with_datasets(source, path, dataset)


def read_data(path: Path) -> dict[str, Any]:
    """Return the table in a TOML, YAML or JSON file; raises UsageError for another."""
    suffix = path.suffix.lower()
    try:
        text = read_limited(path).decode("utf-8-sig")
        if suffix == ".toml":
            found: Any = tomllib.loads(text)
        elif suffix == ".json":
            found = json.loads(text)
        elif suffix in (".yaml", ".yml"):
            found = yaml.safe_load(text)
        else:
            what = f"{path} is not one of .toml, .yaml, .yml, .json, .sh"
            raise UsageError("FILE", what)
    except OSError as error:
        raise UsageError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise UsageError(path, f"cannot be parsed: {line}") from error
    if not isinstance(found, dict):
        raise UsageError(path, "is not a table of keys")
    return found


def _tool_of(data: Mapping[str, Any], path: Path) -> str:
    """Return whose keys these are."""
    config = data.get("config")
    if isinstance(config, Mapping) and "process" in config:
        return "ai-toolkit"
    keys = set(_names(data))
    if keys & set(MUSUBI_DATASET_KEYS):
        return "musubi"
    if "subsets" in keys or "image_dir" in keys:
        return "kohya"
    if keys & set(KOHYA_KEYS):
        return "kohya"
    if keys & set(MUSUBI_KEYS):
        return "musubi"
    what = "has no keys of a known tool"
    tools = ", ".join(TOOLS)
    raise UsageError(path, what, f"say whose it is with --from; tools: {tools}")


def _names(data: Any) -> Iterator[str]:
    """Yield the keys of tables within tables."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield str(key)
            yield from _names(value)
    elif isinstance(data, list):
        for value in data:
            yield from _names(value)


def _of_script(
    path: Path, dataset: Path | None, tool: str | None, number: int | None
) -> Source:
    try:
        text = read_limited(path).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(path, "is not a text file") from error
    script = read_script(text, path)
    command = _chosen(script, path, number)
    source = Source(
        tool or _tool_of_script(command, path),
        [*_entries_of(path, command.flags), *_of_caching(path, script, command)],
        script=command.script,
        files=[path],
        apart=_apart(path, script, command),
    )
    if source.tool == "diffsynth":
        if dataset is not None:
            what = f"has no effect: {path} has its dataset in its flags"
            raise UsageError("--dataset", what)
        return source
    flags = dict(command.flags)
    if flags.get(ARGUMENTS):
        named = Path(flags[ARGUMENTS][0])
        named = named if named.suffix == ".toml" else Path(f"{named}.toml")
        file = _beside(path, named)
        if file is None:
            what = f"names {named}, which is not here: it has the run's flags"
            raise UsageError(path, what, "put it beside the script")
        # What the command says wins over the file.
        given = {entry.key for entry in source.run} | {ARGUMENTS}
        others = _without_sections(file, read_data(file))
        more = [entry for entry in others if entry.key not in given]
        files = [path, file]
        run = [one for one in source.run if one.key != ARGUMENTS]
        named_file = [one for one in source.run if one.key == ARGUMENTS]
        read = [Outcome(one, Result(note=f"is read: {file}")) for one in named_file]
        overruled = [
            Outcome(one, Result(note="the command says otherwise"))
            for one in others
            if one.key in given
        ]
        apart = [*source.apart, *read, *overruled]
        source = replace(source, run=[*run, *more], files=files, apart=apart)
    return _with_datasets(source, path, dataset)


def _chosen(script: Script, path: Path, number: int | None) -> Command:
    """Return the training command that is meant."""
    commands = [one for one in script.commands if one.trains]
    if not commands:
        what = "has no training command: expected accelerate launch or python, then a .py file"
        raise UsageError(path, what)
    if number is None and len(commands) > 1:
        what = f"has {len(commands)} training commands"
        advice = f"choose one with --command 1 to --command {len(commands)}"
        raise UsageError(path, what, advice)
    if number is not None and not 1 <= number <= len(commands):
        what = f"is {number}, but {path} has training commands 1 to {len(commands)}"
        raise UsageError("--command", what)
    return commands[(number or 1) - 1]


def _tool_of_script(command: Command, path: Path) -> str:
    """Return whose script a command runs."""
    if DIFFSYNTH_SCRIPT in command.script:
        return "diffsynth"
    name = script_name(command.script)
    if name.startswith(OF_DIFFUSERS):
        what = f"runs {name}, a script of diffusers, which is not imported"
        advice = "type its flags after dstrain: it answers each with its own"
        raise UsageError(path, what, advice)
    keys = {flag for flag, _ in command.flags}
    if _has_script("musubi", name) or keys & set(MUSUBI_KEYS):
        return "musubi"
    if _has_script("kohya", name) or keys & {*KOHYA_KEYS, DATASET, "network_module"}:
        return "kohya"
    what = f"runs {command.script}, which is no script of a known tool"
    tools = ", ".join(TOOLS)
    raise UsageError(path, what, f"say whose it is with --from; tools: {tools}")


def _has_script(tool: str, name: str) -> bool:
    """Return whether a tool has a script of a name, by its table."""
    patterns = [str(row["script"]) for row in table_of(tool).models]
    return any(one != "*" and fnmatchcase(name, one) for one in patterns)


def script_name(script: str) -> str:
    """Return the name of a script, or of a module, without folders."""
    name = Path(script.replace("\\", "/")).name
    return name if name.endswith(".py") else f"{name.rpartition('.')[2]}.py"


def _entries_of(
    path: Path, flags: Sequence[tuple[str, list[str]]], script: str = ""
) -> list[Entry]:
    """Return flags as entries; a flag without a value is true."""
    found = {}
    for name, words in flags:
        value: Any = True
        if len(words) == 1:
            value = words[0]
        elif words:
            value = words
        beginning = f"{script_name(script)} " if script else ""
        # Of a flag given twice the last counts.
        found[name] = Entry(name, value, f"{path.name}: {beginning}--{name}")
    return list(found.values())


def _of_caching(path: Path, script: Script, chosen: Command) -> list[Entry]:
    """Return the flags of commands that fill caches, where the training has none of
    the name.
    """
    given = {name for name, _ in chosen.flags}
    found: list[Entry] = []
    for command in script.commands:
        if command.trains:
            continue
        for entry in _entries_of(path, command.flags, command.script):
            # The batch of a cache is none of the training.
            if entry.key == "batch_size":
                entry = replace(entry, key="vae_batch_size")
            if entry.key not in given:
                given.add(entry.key)
                found.append(entry)
    return found


def _apart(path: Path, script: Script, command: Command) -> list[Outcome]:
    """Return what a script has beside its commands."""
    found = []
    for name, _ in command.launcher:
        why = (
            "a setting of the launcher: accelerate launch ... -m dstrain --config FILE"
        )
        found.append(_fixed(f"{path.name}: launcher --{name}", Result(note=why)))
    for word in command.positional:
        why = "a word without a flag: the script reads it by its place"
        found.append(_fixed(f"{path.name}: {word}", Result(lost=why)))
    for place, name in _unset(command):
        why = (
            f"{place} has {name}, which the script does not set: write its value there"
        )
        found.append(_fixed(f"{path.name}: {name}", Result(lost=why)))
    for name in script.variables:
        result = Result(note="stands in the commands")
        if name in script.exported:
            result = Result(
                lost="a variable: set it in your shell if it is still needed"
            )
        found.append(_fixed(f"{path.name}: {name}", result))
    for number, one in enumerate([one for one in script.commands if one.trains], 1):
        if one is not command:
            place = f"{path.name}: training command {number}"
            why = f"a run of its own: import it with --command {number}"
            found.append(_fixed(place, Result(lost=why)))
    for word in dict.fromkeys(script.others):
        why = "a line of the shell, which is not run"
        found.append(_fixed(f"{path.name}: {word}", Result(note=why)))
    return found


def _unset(command: Command) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command with the variables in them that have no value here."""
    for flag, words in command.flags:
        for word in words:
            for match in (*VARIABLE.finditer(word), *BATCH_VARIABLE.finditer(word)):
                yield f"--{flag}", match[0]


def _fixed(place: str, result: Result, value: Any = None) -> Outcome:
    """Return what becomes of something that no table has."""
    return Outcome(Entry(place.rpartition(" ")[2], value, place), result)


def _without_sections(path: Path, data: Mapping[str, Any]) -> list[Entry]:
    """Return the keys of a file of flags, whose sections mean nothing."""
    found = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            found += [
                Entry(name.replace("-", "_"), one, f"{path.name}: {key}.{name}")
                for name, one in value.items()
            ]
        else:
            found.append(Entry(key.replace("-", "_"), value, f"{path.name}: {key}"))
    return found


def _flat(path: Path, data: Mapping[str, Any]) -> list[Entry]:
    return [Entry(key, value, f"{path.name}: {key}") for key, value in data.items()]


def _with_datasets(source: Source, path: Path, dataset: Path | None) -> Source:
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
        dataset = _beside(path, Path(str(named.value)))
        if dataset is None:
            what = f"names {named.value}, which is not here: it has the datasets"
            raise UsageError(path, what, "give the file with --dataset FILE")
    if dataset is None:
        folders = [
            entry for entry in general if entry.key in CLASS_FOLDERS and entry.value
        ]
        shared = [entry for entry in general if entry not in folders]
        parts = [part for folder in folders for part in _class_folders(folder)]
        own = [_merged(shared, part) for part in parts]
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
    own = _flat_table(path, "general", data.get("general") or {})
    shared = _merged(general, own)
    datasets = []
    for number, table in enumerate(_tables(path, "datasets", data), 1):
        place = f"datasets[{number}]"
        rest = {key: value for key, value in table.items() if key != "subsets"}
        own = _merged(shared, _flat_table(path, place, rest))
        if "subsets" not in table:
            datasets.append(own)
        for index, subset in enumerate(_tables(path, "subsets", table), 1):
            entries = _flat_table(path, f"{place}.subsets[{index}]", subset)
            datasets.append(_merged(own, entries))
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
    for number, table in enumerate(_tables(path, "datasets", data), 1):
        rest = {key: value for key, value in table.items() if key != "subsets"}
        tables.append((f"datasets[{number}]", rest))
    entries = [one for place, own in tables for one in _flat_table(path, place, own)]
    used = {entry.place for own in datasets for entry in own}
    for entry in (*general, *entries):
        if entry.place not in used:
            why = "each dataset says otherwise" if datasets else "there are no datasets"
            found.append(Outcome(entry, Result(note=why)))
    return found


def _tables(
    path: Path, key: str, data: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """Return a list of tables; raises UsageError for anything else."""
    found = data.get(key) or []
    if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        return found
    raise UsageError(path, f"{key} is not a list of tables")


def _flat_table(path: Path, place: str, table: Mapping[str, Any]) -> list[Entry]:
    if not isinstance(table, Mapping):
        raise UsageError(path, f"{place} is not a table")
    return [
        Entry(key, value, f"{path.name}: {place}.{key}") for key, value in table.items()
    ]


def _merged(first: Sequence[Entry], second: Sequence[Entry]) -> list[Entry]:
    """Return entries with those of the second in place of those of the first."""
    own = {entry.key for entry in second}
    return [*(entry for entry in first if entry.key not in own), *second]


def _of_ai_toolkit(path: Path, data: Mapping[str, Any]) -> Source:
    """Return what the first process of a job says."""
    run: list[Entry] = []
    apart: list[Outcome] = []
    config = data.get("config")
    if not isinstance(config, Mapping):
        raise UsageError(path, "has no table config, as files of ai-toolkit have")
    for key, value in data.items():
        if key == "meta":
            run += _leaves(path, "meta", value)
        elif key != "config":
            run.append(Entry(key, value, f"{path.name}: {key}"))
    for key, value in config.items():
        if key != "process":
            run.append(Entry(f"config.{key}", value, f"{path.name}: config.{key}"))
    processes = _tables(path, "process", config)
    if not processes:
        raise UsageError(path, "has no process: expected a list under config")
    for number in range(2, len(processes) + 1):
        why = "a run of its own: put it into a file of its own"
        place = f"{path.name}: config.process[{number}]"
        apart.append(_fixed(place, Result(lost=why)))
    process = processes[0]
    datasets = [
        _leaves(path, f"datasets[{number}]", one, "")
        for number, one in enumerate(_tables(path, "datasets", process), 1)
    ]
    for key, value in process.items():
        if key == "trigger_word" and value is not None and datasets:
            shared = Entry(key, value, f"{path.name}: {key}")
            merged = [_merged([shared], own) for own in datasets]
            if not any(shared in own for own in merged):
                why = "each dataset says otherwise"
                apart.append(Outcome(shared, Result(note=why)))
            datasets = merged
        elif key != "datasets":
            run += _leaves(path, key, value)
    return Source("ai-toolkit", run, datasets, files=[path], apart=apart)


def _leaves(path: Path, place: str, value: Any, key: str | None = None) -> list[Entry]:
    """Return the values of tables within tables, by their dotted keys."""
    key = place if key is None else key
    if not isinstance(value, Mapping) or not value:
        return [Entry(key, value, f"{path.name}: {place}")]
    found = []
    for name, one in value.items():
        dotted = f"{key}.{name}" if key else str(name)
        found += _leaves(path, f"{place}.{name}", one, dotted)
    return found


def _beside(path: Path, named: Path) -> Path | None:
    """Return a file that another names: relative to the working directory, or beside
    it; None if it is in neither place.
    """
    for place in (named, path.parent / named, path.parent / named.name):
        if place.is_file():
            return place
    return None
