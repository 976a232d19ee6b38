"""Write options as a file of `--config`, and the report of what became of each key."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click
from dstrain.plugin import TrainConfig
from dstrain.plugin.commands import assignment, flags_by_name, headings, printable

from dstrain_tools.importing.entries import Source
from dstrain_tools.importing.translation import Setting, Translation, shown

MOST_OF_KEYS = 32
"""Columns of a key, before what becomes of it stands on the next line."""
WIDEST = 120
"""Columns of the report in a wide terminal."""
HEADINGS = (
    ("changed", "changed"),
    ("partial", "carried over in part"),
    ("missing", "not carried over"),
    ("needless", "not needed"),
)


def as_toml(found: Translation, source: Source) -> str:
    """Return the options as TOML, with the key that each is from beside it."""
    names = ", ".join(file.name for file in source.files)
    lines = [_comment(f"From {found.title}: {names}")]
    for group in headings(map(_group_of, found.run)):
        own = [name for name in _in_order(found) if _group_of(name) == group]
        if own:
            lines += ["", f"# {group}", *(_line(one, found.run[one]) for one in own)]
    for options in found.datasets:
        lines += ["", "[[dataset]]"]
        lines += [_line(option, setting) for option, setting in options.items()]
    for kind, heading in HEADINGS:
        lost = [one for one in found.outcomes if one.result.kind == kind]
        if lost and kind in ("partial", "missing"):
            lines += ["", f"# {heading.capitalize()}:"]
            lines += [_comment(f"{one.entry.place}: {one.result.lost}") for one in lost]
    return "\n".join(lines) + "\n"


def _in_order(found: Translation) -> list[str]:
    """Return the options of the run in the order of --help; a family's own come first."""
    order = list(flags_by_name(TrainConfig))
    return sorted(
        found.run, key=lambda name: order.index(name) if name in order else -1
    )


def _group_of(option: str) -> str:
    flag = flags_by_name(TrainConfig).get(option)
    return flag.group if flag is not None else "model"


def _line(option: str, setting: Setting) -> str:
    return f"{assignment(option, setting.value, flags_by_name(TrainConfig))}  {_comment(setting.comment)}"


def _comment(text: str) -> str:
    """Return a comment on one line, without characters that TOML does not take."""
    return f"# {printable(' '.join(text.split()))}"


def report(found: Translation) -> str:
    """Return what became of each key, those first that need a look."""
    parts = []
    for kind, heading in HEADINGS:
        rows = list(_rows(found, kind))
        if rows:
            parts.append(f"{heading} ({len(rows)}):\n{_by_file(rows)}")
    if found.defaults:
        rows = [(key, ", ".join(_shown(one))) for key, one in found.defaults.items()]
        heading = f"defaults of {found.title} that are not ours"
        parts.append(f"{heading} ({len(rows)}):\n{_by_file(rows)}")
    carried = list(_rows(found, "carried"))
    parts.append(f"carried over ({len(carried)}):\n{_by_file(carried)}")
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


def _by_file(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows in two columns, below the file that each is of, no wider than the
    terminal.
    """
    # click does not count what it indents.
    width = min(shutil.get_terminal_size().columns, WIDEST) - 4
    formatter = click.HelpFormatter(width=width)
    files: dict[str, list[tuple[str, str]]] = {}
    for place, text in rows:
        file, colon, key = place.partition(": ")
        file, key = (file, key) if colon else ("", place)
        files.setdefault(file, []).append((key, text))
    for file, own in files.items():
        with formatter.indentation():
            if file:
                formatter.write_text(file)
            with formatter.indentation():
                formatter.write_dl(own, col_max=MOST_OF_KEYS)
    return formatter.getvalue().rstrip("\n")
