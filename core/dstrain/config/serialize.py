"""A configuration as a file: every flag by name, as `--config` reads it; what is secret
is not written.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.config.fields import LoraFile, NamedInput, flags
from dstrain.config.schema import ModelChoice
from dstrain.console import redacted
from dstrain.storage.files import write_file

OF_ONE_START = frozenset({"overwrite", "resume", "dry_run"})
"""Flags of one start of a run, which are not written: a written configuration neither
removes a run nor goes on.
"""


def as_flags(config: ModelChoice) -> dict[str, Any]:
    """Every flag by its name, the family's own and -p too, with its value as JSON: None
    for one that is absent.
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
    """Write a configuration without OF_ONE_START, and the versions of what runs it, as
    JSON; raises SystemFault.
    """
    told = {
        name: value
        for name, value in as_flags(config).items()
        if name not in OF_ONE_START
    }
    text = json.dumps(
        {**told, "versions": dict(versions)},
        ensure_ascii=False,
        indent=1,
        sort_keys=True,
    )
    # Half of a surrogate pair, which stands for a byte of a path that is no text,
    # becomes JSON's own escape.
    write_file(path, (text + "\n").encode(errors="backslashreplace"))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, LoraFile):
        return redacted(f"{value.path}:{value.scale}")
    if isinstance(value, NamedInput):
        return redacted(f"{value.name}={value.text}")
    return redacted(str(value)) if isinstance(value, str | Path) else value
