"""`--config FILE`: flags by name, read from TOML, YAML or JSON; the command line wins
over them.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dstrain.cli.unsupported import no_such
from dstrain.config.fields import Flag, check_value
from dstrain.errors import UsageError

SUFFIXES = (".toml", ".yaml", ".yml", ".json")
NOT_FLAGS = ("versions",)
"""What a written configuration holds beside its flags; it is not read."""
TRUTHS = {
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}.items()


class TextOrNumber(click.ParamType[str]):
    """A value of which only the family knows whether it is a number; it is handed on as
    text.
    """

    name = "text"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the text."""
        return str(value)


def read_file(path: Path) -> dict[str, Any]:
    """What a file says: names, with '-' as '_', and values; YAML's are text, for a flag
    alone knows what `no` is.

    Raises UsageError for a file that cannot be read, is no such file, has sections, or
    has a name twice.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError("--config", f"{path} is none of {', '.join(SUFFIXES)}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        pairs = {".toml": _toml, ".json": _json}.get(path.suffix.lower(), _yaml)(text)
    except OSError as error:
        raise UsageError(
            "--config", f"{path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(str(path), "is no UTF-8 text") from error
    except RecursionError as error:
        raise UsageError(
            str(path), "is nested too deeply; flags are written flat, by name"
        ) from error
    except (ValueError, UsageError) as error:
        raise UsageError(
            str(path), error.what if isinstance(error, UsageError) else str(error)
        ) from error
    found: dict[str, Any] = {}
    for name, value in pairs:
        key = name.replace("-", "_")
        if key in found:
            raise UsageError(f"{path}:{name}", "is given twice")
        found[key] = value
    flat = {key: value for key, value in found.items() if key not in NOT_FLAGS}
    for key, value in flat.items():
        if any(
            isinstance(one, Mapping | _Pairs)
            for one in (value, *(value if isinstance(value, list) else ()))
        ):
            advice = "this file has sections, as those of other programs have"
            raise UsageError(
                f"{path}:{key}", "is a table; flags are written flat, by name", advice
            )
    return flat


def values_of(
    path: Path,
    written: Mapping[str, Any],
    options: Mapping[str, click.Option],
    flags: Sequence[Flag],
) -> dict[str, Any]:
    """The values of a file by the names of parameters, each read by its own option, and
    checked as a flag's are.

    options: key -> the option it gives. Raises UsageError that names file and key for
    an unknown one, or another type.
    """
    bounds = {flag.name: flag for flag in flags}
    values: dict[str, Any] = {}
    for key, value in written.items():
        where = f"{path}:{key}"
        if key not in options:
            raise UsageError(where, *no_such(key, options))
        if value is None:
            continue
        option = options[key]
        read = _read(option, value, where)
        if key in bounds:
            try:
                check_value(bounds[key], read)
            except UsageError as error:
                raise UsageError(where, error.what, *error.help_lines) from error
        # -p keeps its no:, which its option takes off again.
        values[str(option.name)] = value if key == "p" else read
    return values


def _read(option: click.Option, value: Any, where: str) -> Any:
    if option.multiple:
        if not isinstance(value, list):
            raise UsageError(
                where, f"may be repeated, so want a list, got {_kind(value)}"
            )
        return tuple(_one(option, one, where) for one in value)
    if isinstance(value, list):
        raise UsageError(
            where,
            "is a list, but is one value; names are written in one text, with commas",
        )
    if option.is_flag:
        truth = (
            value if isinstance(value, bool) else dict(TRUTHS).get(str(value).lower())
        )
        if truth is None:
            raise UsageError(where, f"want true or false, got {_kind(value)}")
        return truth
    bare = isinstance(option.flag_value, str)
    if bare and (value is False or str(value).lower() == "false"):
        return None
    return (
        option.flag_value
        if bare and (value is True or str(value).lower() == "true")
        else _one(option, value, where)
    )


def _one(option: click.Option, value: Any, where: str) -> Any:
    """A value by its option's own type, which reads text; a number stands for itself."""
    kinds: Mapping[str, tuple[type, ...]] = {
        "integer": (int, str),
        "float": (int, float, str),
    }
    wanted = (
        (int, float, str)
        if isinstance(option.type, TextOrNumber)
        else kinds.get(option.type.name, (str,))
    )
    if not isinstance(value, wanted) or isinstance(value, bool):
        names = {"integer": "a whole number", "float": "a number"}
        raise UsageError(
            where, f"want {names.get(option.type.name, 'text')}, got {_kind(value)}"
        )
    try:
        return option.type.convert(value, option, None)
    except click.BadParameter as error:
        raise UsageError(where, error.message.rstrip(".")) from error
    except UsageError as error:
        raise UsageError(where, error.what, *error.help_lines) from error


def _kind(value: Any) -> str:
    """What a value is, in a file's words; it is not shown itself where it is no number:
    it may be a secret.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    return {
        "str": "text",
        "list": "a list",
        "dict": "a table",
        "NoneType": "nothing",
    }.get(type(value).__name__, f"a {type(value).__name__}")


def _toml(text: str) -> list[tuple[str, Any]]:
    return list(tomllib.loads(text).items())


def _json(text: str) -> list[tuple[str, Any]]:
    found = json.loads(text, object_pairs_hook=_Pairs)
    if not isinstance(found, _Pairs):
        raise UsageError("", "is no table of flags")
    return list(found)


class _Pairs(list[tuple[str, Any]]):
    """The entries of a JSON object, in which a name may come twice."""


def _yaml(text: str) -> list[tuple[str, Any]]:
    """The entries of a YAML mapping. Nothing is constructed: scalars are text, and null
    is None.
    """
    import yaml

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if (
                getattr(event, "tag", None) is not None
                or getattr(event, "anchor", None) is not None
            ):
                raise UsageError(
                    "",
                    f"line {event.start_mark.line + 1} has a tag or an anchor; values are plain",
                )
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UsageError("", f"is no YAML: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise UsageError(
            "", "is no YAML: it has a character that is not allowed"
        ) from error
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise UsageError("", "is no table of flags")
    return [(str(key.value), _plain(value)) for key, value in node.value]


def _plain(node: Any) -> Any:
    if isinstance(node.value, str):
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if node.tag == "tag:yaml.org,2002:map":
        return {str(key.value): _plain(value) for key, value in node.value}
    return [_plain(one) for one in node.value]
