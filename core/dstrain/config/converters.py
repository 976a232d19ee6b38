"""Convert what a script may give for an option to what it keeps."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.config.lora_file import LoraFile, parse_lora
from dstrain.config.value_syntax import NamedInput, parse_input

AnyPath = str | Path


def as_path(given: AnyPath) -> Path:
    """Return a path."""
    return Path(given) if isinstance(given, str) else given


def as_optional_path(given: AnyPath | None) -> Path | None:
    """Return a path, or None."""
    return None if given is None else as_path(given)


def as_paths(given: AnyPath | Sequence[AnyPath]) -> tuple[Path, ...]:
    """Return one path or several."""
    return tuple(as_path(one) for one in _several(given))


def as_texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return one text or several."""
    return tuple(_several(given))


def as_datasets(
    given: str | Mapping[str, object] | Sequence[str | Mapping[str, object]],
) -> tuple[str, ...]:
    """Return one dataset or several as JSON."""
    return tuple(
        json.dumps(dict(one), default=str) if isinstance(one, Mapping) else one
        for one in _several(given)
    )


def as_lora_files(
    given: AnyPath | LoraFile | Sequence[AnyPath | LoraFile],
) -> tuple[LoraFile, ...]:
    """Return one LoRA file or several, of which text is written as for --lora."""
    return tuple(
        parse_lora(str(one)) if isinstance(one, (str, Path)) else one
        for one in _several(given)
    )


def as_inputs(
    given: str | NamedInput | Sequence[str | NamedInput],
) -> tuple[NamedInput, ...]:
    """Return one input or several, of which text is NAME=VALUE."""
    return tuple(
        parse_input(one) if isinstance(one, str) else one for one in _several(given)
    )


def as_text(given: AnyPath | None) -> str | None:
    """Return text, which may be a path."""
    return str(given) if isinstance(given, Path) else given


def as_commas(given: str | Sequence[str] | None) -> str | None:
    """Return names, of which there may be a list, separated by commas."""
    return given if given is None or isinstance(given, str) else ",".join(given)


def as_file_list(
    given: AnyPath | Sequence[AnyPath | Sequence[AnyPath]] | None,
) -> str | None:
    """Return files, of which there may be a list, as the JSON of --model_paths."""
    if given is None or isinstance(given, str):
        return given
    files = [
        str(one) if isinstance(one, AnyPath) else [str(shard) for shard in one]
        for one in _several(given)
    ]
    return json.dumps(files)


def _several(given: Any) -> Sequence[Any]:
    """Return a list as it is, and one value as a list of one."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    return given if is_list else (given,)
