"""Read the training command of a shell script as entries, with what else the script says."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.plugin import UsageError, read_limited

from dstrain_tools.importing.entries import Entry, Outcome, Result, Source
from dstrain_tools.importing.reading.data_files import (
    beside,
    read_data,
    without_sections,
)
from dstrain_tools.importing.reading.datasets import with_datasets
from dstrain_tools.importing.reading.shell import Command, Script, read_script
from dstrain_tools.importing.reading.tool import script_name, tool_of_script

PRECISION = "mixed_precision"
ARGUMENTS = "config_file"
"""Their flag that names a file of flags."""


def read_command(
    path: Path, dataset: Path | None, tool: str | None, number: int | None
) -> Source:
    """Return what a training command of a script says, with the files that it names.

    Raises UsageError as `read_source` does.
    """
    try:
        text = read_limited(path).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(path, "is not a text file") from error
    script = read_script(text, path)
    command = _chosen(script, path, number)
    source = Source(
        tool or tool_of_script(command, path),
        [*_entries_of(path, command.flags), *_of_caching(path, script, command)],
        script=command.script,
        files=[path],
        apart=_apart(path, script, command),
    )
    if source.tool == "diffsynth":
        if dataset is not None:
            what = f"has no effect: {path} has its dataset in its flags"
            raise UsageError("--dataset", what)
        return _with_launcher(source, command, path)
    source = _with_launcher(_with_arguments(source, path), command, path)
    return with_datasets(source, path, dataset)


def _with_arguments(source: Source, path: Path) -> Source:
    """Return the source with the flags in the file of flags that a command names; what
    the command says wins over the file.
    """
    named = {entry.key: entry for entry in source.run}.get(ARGUMENTS)
    if named is None:
        return source
    name = Path(str(named.value))
    name = name if name.suffix == ".toml" else Path(f"{name}.toml")
    file = beside(path, name)
    if file is None:
        what = f"names {name}, which is not here: it has the run's flags"
        raise UsageError(path, what, "put it beside the script")
    run = [entry for entry in source.run if entry is not named]
    given = {entry.key for entry in run}
    apart = [*source.apart, Outcome(named, Result(note=f"is read: {file}"))]
    for entry in without_sections(file, read_data(file)):
        if entry.key in given:
            apart.append(Outcome(entry, Result(note="the command says otherwise")))
        else:
            run.append(entry)
    return replace(source, run=run, files=[*source.files, file], apart=apart)


def _with_launcher(source: Source, command: Command, path: Path) -> Source:
    """Return the source with the settings of the launcher; that of the dtype is the
    training's where this has none.
    """
    given = {entry.key for entry in source.run}
    run = [*source.run]
    apart = [*source.apart]
    for entry in _entries_of(path, command.launcher):
        place = entry.place.replace(": --", ": launcher --")
        entry = replace(entry, place=place)
        if entry.key == PRECISION and entry.key not in given:
            run.append(entry)
        else:
            why = "a setting of the launcher: accelerate launch ... -m dstrain --config FILE"
            apart.append(Outcome(entry, Result(note=why)))
    return replace(source, run=run, apart=apart)


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
    for word in command.positional:
        why = "a word without a flag: the script reads it by its place"
        found.append(Outcome.at(f"{path.name}: {word}", Result(lost=why)))
    for word in command.given_later:
        why = "stands for the script's arguments: add the flags among them"
        found.append(Outcome.at(f"{path.name}: {word}", Result(lost=why)))
    for one in script.commands:
        if one is command or not one.trains:
            found += _cut_off(path, one)
    for name in script.variables:
        result = Result(note="stands in the commands")
        if name in script.exported:
            result = Result(
                lost="a variable: set it in your shell if it is still needed"
            )
        found.append(Outcome.at(f"{path.name}: {name}", result))
    for number, one in enumerate([one for one in script.commands if one.trains], 1):
        if one is not command:
            place = f"{path.name}: training command {number}"
            why = f"a run of its own: import it with --command {number}"
            found.append(Outcome.at(place, Result(lost=why)))
    for word in dict.fromkeys(script.others):
        why = "a line of the shell, which is not run"
        found.append(Outcome.at(f"{path.name}: {word}", Result(note=why)))
    return found


def _cut_off(path: Path, command: Command) -> Iterator[Outcome]:
    """Yield the flags on lines behind a command that were meant as a part of it."""
    for number, name in command.cut_off:
        why = (
            "a comment, an empty line or a missing mark ends the command before line "
            f"{number}, so this flag is not part of it: join the lines and import again"
        )
        place = f"{path.name}: line {number} --{name}"
        yield Outcome.at(place, Result(lost=why))
