"""Read `--config FILE`: options by name, in TOML, YAML or JSON."""

import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstrain.config import LoraFile, flags
from dstrain.config.options import GenerateConfig, TrainConfig
from dstrain.console import get_logger
from dstrain.errors import UsageError
from dstrain.storage import read_limited

logger = get_logger(__name__)
TABLES = "dataset"
"""The only option that has tables: one for each dataset."""
UNQUOTED = re.compile("Invalid value|Invalid hex value|Unescaped")
"""How tomllib's message begins about text without quotes, and a path of Windows in double
ones, in which a backslash has a meaning."""
QUOTES = "in TOML, text stands in quotes, and a path with backslashes in single ones"
PATHS = frozenset(
    {
        flag.name
        for config in (TrainConfig, GenerateConfig)
        for flag in flags(config)
        if flag.kind in (Path, LoraFile)
    }
    | {"model_id", "model_paths"}
)
"""Options of paths, beside those of families that end so."""
YAML_NULLS = ("", "~", "null", "Null", "NULL")


def read_file(path: Path) -> dict[str, Any]:
    """Return the options that a file gives, with '-' in names as '_'.

    Values are text or lists of text, as on the command line, so that only the type of
    an option decides what `no` or `1e-4` is; null leaves an option out. Raises
    UsageError for a file that cannot be read, or has sections.
    """
    try:
        found = _parse(path, read_limited(path).decode("utf-8-sig"))
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise UsageError("--config", what) from error
    except RecursionError as error:
        raise UsageError(path, "cannot be parsed: it is nested too deeply") from error
    except ValueError as error:
        advice = [QUOTES] if UNQUOTED.match(str(error)) else []
        raise UsageError(path, f"cannot be parsed: {error}", *advice) from error
    if not isinstance(found, dict):
        raise UsageError(path, "is not a table of options")
    options: dict[str, Any] = {}
    # A written configuration records versions, which are not an option, and has the values
    # of its recipe itself.
    recorded = ("versions", "recipe") if "versions" in found else ()
    text_of = _as_text if recorded else _as_text_at_home
    for name, value in found.items():
        key = str(name).replace("-", "_")
        where = f"{path}:{name}"
        if value is None or key in recorded:
            continue
        if isinstance(value, list):
            options[key] = [_of_list(key, one, where, text_of) for one in value]
        else:
            options[key] = text_of(key, value, where)
    return options


def _of_list(
    key: str, value: Any, where: str, text_of: Callable[[str, Any, str], str]
) -> str:
    """Return an entry of a list as text: a table [[dataset]] as JSON."""
    if key == TABLES and isinstance(value, dict):
        return json.dumps(
            {
                str(name): [text_of(str(name), one, where) for one in own]
                if isinstance(own, list)
                else text_of(str(name), own, f"{where}:{name}")
                for name, own in value.items()
            },
            ensure_ascii=False,
        )
    return text_of(key, value, where)


def _as_text_at_home(key: str, value: Any, where: str) -> str:
    """Return a value with the home folder for the `~/` that a path begins with, since no
    shell reads a file.
    """
    text = _as_text(key, value, where)
    name = key.replace("-", "_")
    if name not in PATHS and not name.endswith("_path"):
        return text
    if text.startswith("["):  # a list of files, as JSON
        return text.replace('"~/', f'"{Path.home().as_posix()}/')
    # Unlike that of Path, this leaves the rest as it is.
    return os.path.expanduser(text) if text.startswith("~/") else text


def _as_text(key: str, value: Any, where: str) -> str:
    if isinstance(value, dict | list):
        advice = "options are not nested; `dstrain import FILE`, of plugin-tools, reads files of other tools"
        raise UsageError(where, "is a table; expected one value, or a list", advice)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(path: Path, text: str) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".toml":
        return tomllib.loads(text, parse_float=str)
    if suffix == ".json":
        return json.loads(text, parse_float=str)
    if suffix in (".yaml", ".yml"):
        return _yaml(text)
    raise UsageError("--config", f"{path} is not one of .toml, .yaml, .yml, .json")


def _yaml(text: str) -> Any:
    import yaml

    try:
        # The base loader constructs nothing: every scalar is text, tags have no effect.
        loader = yaml.BaseLoader(text)
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            # A quoted scalar has a style.
            node.value = [
                (name, value)
                for name, value in node.value
                if getattr(value, "style", "") or value.value not in YAML_NULLS
            ]
        return loader.construct_document(node) if node else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", "a character that is not allowed")
        raise ValueError(f"{problem}{line}") from error
