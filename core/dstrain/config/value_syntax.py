"""Parse the small languages that values of options are written in."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from dstrain.console import shell_word
from dstrain.errors import UsageError


@dataclass(frozen=True)
class NamedInput:
    """An input of inference as text: the file name of an image or a video, else the
    value.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


def split_commas(text: str | None) -> tuple[str, ...]:
    """Split 'to_q, to_k' into its names; None and '' name nothing."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def parse_model_paths(text: str | None) -> tuple[tuple[str, ...], ...]:
    """Parse `--model_paths` into one tuple of files per entry of the JSON list; raises
    UsageError for anything else.
    """
    flag = "--model_paths"
    try:
        entries = json.loads(text or "[]")
    except json.JSONDecodeError as error:
        if text and Path(text).is_dir():
            what = f"{text} is a folder, and files are expected"
            advice = f"for all files of a model: --model_id {shell_word(text)}"
            raise UsageError(flag, what, advice) from error
        example = """a list of files is written '["a.safetensors", "b.safetensors"]'"""
        raise UsageError(flag, f"is not JSON: {error}", example) from error
    groups = []
    for entry in entries if isinstance(entries, list) else [entries]:
        group = entry if isinstance(entry, list) else [entry]
        if not group or not all(isinstance(path, str) and path for path in group):
            what = f"expected a list of paths, or of lists of paths, got {text}"
            raise UsageError(flag, what)
        groups.append(tuple(group))
    return tuple(groups)


def parse_origins(text: str | None) -> tuple[tuple[str, str, str], ...]:
    """Parse `--model_id_with_origin_paths`, ID:PATTERN or ID@REVISION:PATTERN, ...,
    into (id, pattern, revision), '' for the hub's default; one part's revision holds
    for all of its id.

    Raises UsageError for a malformed part, and for two revisions of an id.
    """
    flag = "--model_id_with_origin_paths"
    found: list[tuple[str, str]] = []
    revisions: dict[str, str] = {}
    for part in split_commas(text):
        match = re.fullmatch(r"([^:@]+)(?:@([^:]+))?:(.+)", part)
        if match is None:
            what = f"expected ID:PATTERN or ID@REVISION:PATTERN, got {part!r}"
            raise UsageError(flag, what)
        model_id, revision, pattern = match.groups(default="")
        known = revisions.setdefault(model_id, revision) if revision else ""
        if known != revision:
            what = f"{model_id} is given with two revisions, {known} and {revision}"
            raise UsageError(flag, f"{what}; give one of them")
        if pattern.startswith("/") or ".." in pattern.split("/"):
            what = f"{pattern!r} leads out of the model's folder"
            raise UsageError(flag, f"{what}; expected a pattern of its files")
        found.append((model_id, pattern))
    return tuple(
        (model_id, pattern, revisions.get(model_id, "")) for model_id, pattern in found
    )


def parse_input(text: str) -> NamedInput:
    """Parse NAME=VALUE; raises UsageError without a name."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise UsageError("--input", f"expected NAME=VALUE, got {text!r}")
    return NamedInput(name.strip().replace("-", "_"), value)
