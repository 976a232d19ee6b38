"""Read a file of TOML, YAML or JSON, and the tables in it, as entries."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from dstrain.plugin import UsageError, read_limited

from dstrain_tools.importing.entries import Entry


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
            if _has_itself(found, set()):
                raise ValueError("a value contains itself")
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


def _has_itself(value: Any, around: set[int]) -> bool:
    """Return whether a value is a part of its own, as YAML can say.

    around: The ids of what the value is in.
    """
    if not isinstance(value, dict | list):
        return False
    if id(value) in around:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return any(_has_itself(part, around | {id(value)}) for part in parts)


def table_list(
    path: Path, key: str, data: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """Return a list of tables; raises UsageError for anything else."""
    found = data.get(key) or []
    if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        return found
    raise UsageError(path, f"{key} is not a list of tables")


def without_sections(path: Path, data: Mapping[str, Any]) -> list[Entry]:
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


def flat_table(path: Path, place: str, table: Mapping[str, Any]) -> list[Entry]:
    """Return the keys of one table; raises UsageError for anything else."""
    if not isinstance(table, Mapping):
        raise UsageError(path, f"{place} is not a table")
    return [
        Entry(key, value, f"{path.name}: {place}.{key}") for key, value in table.items()
    ]


def leaves(path: Path, place: str, value: Any, key: str | None = None) -> list[Entry]:
    """Return the values of tables within tables, by their dotted keys."""
    key = place if key is None else key
    if not isinstance(value, Mapping) or not value:
        return [Entry(key, value, f"{path.name}: {place}")]
    found = []
    for name, one in value.items():
        dotted = f"{key}.{name}" if key else str(name)
        found += leaves(path, f"{place}.{name}", one, dotted)
    return found


def merged(first: Sequence[Entry], second: Sequence[Entry]) -> list[Entry]:
    """Return entries with those of the second in place of those of the first."""
    own = {entry.key for entry in second}
    return [*(entry for entry in first if entry.key not in own), *second]


def beside(path: Path, named: Path) -> Path | None:
    """Return a file that another names: relative to the working directory, or beside
    it; None if it is in neither place.
    """
    for place in (named, path.parent / named, path.parent / named.name):
        if place.is_file():
            return place
    return None
