"""Write a configuration to a file that `--config` reads, without its secrets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.config.fields import LoraFile, NamedInput, flags
from dstrain.config.schema import ModelChoice, options_affecting
from dstrain.console import redacted
from dstrain.storage.files import write_file


def as_flags(config: ModelChoice) -> dict[str, Any]:
    """Return the value of every option as JSON, including the family's and -p; None
    stands for an absent one.
    """
    values = {flag.name: getattr(config, flag.name) for flag in flags(type(config))}
    given = {
        **values,
        **config.family_options,
        "p": tuple(f"no:{name}" for name in config.left_out),
    }
    return {name: _plain(value) for name, value in given.items()}


def write_resolved(
    path: Path, config: ModelChoice, versions: Mapping[str, str]
) -> None:
    """Write a configuration and the versions of the libraries as JSON.

    Options of one start are left out, so that a written configuration neither resumes
    nor deletes a run. Raises SystemFault.
    """
    written: dict[str, Any] = {**as_flags(config), "versions": dict(versions)}
    for name in options_affecting("start"):
        written.pop(name, None)
    text = json.dumps(written, ensure_ascii=False, indent=1, sort_keys=True)
    # A lone surrogate stands for a byte of a path that is not UTF-8; JSON can escape it.
    write_file(path, (text + "\n").encode(errors="backslashreplace"))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, LoraFile):
        return redacted(f"{value.path}:{value.scale}")
    if isinstance(value, NamedInput):
        return redacted(f"{value.name}={value.text}")
    return redacted(str(value)) if isinstance(value, str | Path) else value
