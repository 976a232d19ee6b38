"""Write options as a file of `--config`, and the report of what became of each key."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from dstrain.config.fields import Group

from dstrain_tools.importing.entries import Source
from dstrain_tools.importing.translation import Setting, Translation, run_flags, shown

HEADINGS = (
    ("changed", "changed"),
    ("missing", "not carried over"),
    ("needless", "not needed"),
)


def as_toml(found: Translation, source: Source) -> str:
    """Return the options as TOML, with the key that each is from beside it."""
    names = ", ".join(file.name for file in source.files)
    lines = [f"# From {found.title}: {names}"]
    for group in get_args(Group):
        own = [name for name in _in_order(found) if _group_of(name) == group]
        if own:
            lines += ["", f"# {group}", *(_line(one, found.run[one]) for one in own)]
    for options in found.datasets:
        lines += ["", "[[dataset]]"]
        lines += [_line(option, setting) for option, setting in options.items()]
    missing = [one for one in found.outcomes if one.result.kind == "missing"]
    if missing:
        lines += ["", "# Not carried over:"]
        lines += [f"# {one.entry.place}: {one.result.lost}" for one in missing]
    return "\n".join(lines) + "\n"


def _in_order(found: Translation) -> list[str]:
    """Return the options of the run in the order of --help; a family's own come first."""
    order = list(run_flags())
    return sorted(
        found.run, key=lambda name: order.index(name) if name in order else -1
    )


def _group_of(option: str) -> str:
    flag = run_flags().get(option)
    return flag.group if flag is not None else "model"


def _line(option: str, setting: Setting) -> str:
    comment = " ".join(setting.comment.split())
    return f"{option} = {literal(option, setting.value)}  # {comment}"


def literal(option: str, value: Any) -> str:
    """Return a value as TOML has it; a number stays as it was written."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(option, one) for one in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    flag = run_flags().get(option)
    text = str(value)
    if flag is not None and flag.kind is bool and text.lower() in ("true", "false"):
        return text.lower()
    is_text = flag is not None and flag.kind not in (int, float)
    if not is_text and _is_number(text):
        return text
    # A string of JSON is one of TOML, but for one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text[:1].isdigit() and text[-1:].isdigit() and "_" not in text


def report(found: Translation) -> str:
    """Return what became of each key, those first that need a look."""
    parts = []
    for kind, heading in HEADINGS:
        rows = list(_rows(found, kind))
        if rows:
            parts.append(f"{heading} ({len(rows)}):\n{_indented(rows)}")
    if found.defaults:
        rows = [(key, ", ".join(_shown(one))) for key, one in found.defaults.items()]
        heading = f"defaults of {found.title} that are not ours"
        parts.append(f"{heading} ({len(rows)}):\n{_indented(rows)}")
    carried = list(_rows(found, "carried"))
    parts.append(f"carried over ({len(carried)}):\n{_indented(carried)}")
    return "\n\n".join(parts)


def _rows(found: Translation, kind: str) -> Iterator[tuple[str, str]]:
    for one in found.outcomes:
        result = one.result
        if result.kind != kind:
            continue
        text = result.lost or result.note
        if result.options:
            options = ", ".join(_shown(result.options))
            text = f"{options}; {text}" if text else options
        yield one.entry.place, text


def _shown(options: Mapping[str, Any]) -> Iterator[str]:
    for option, value in options.items():
        yield f"{option} = {shown(value)}"


def _indented(rows: list[tuple[str, str]]) -> str:
    width = max((len(place) for place, _ in rows), default=0)
    return "\n".join(f"  {place:{width}}  {text}" for place, text in rows)
