"""Write down what this project's plugins add: core/dstrain/not_installed.json, from which an
option, a command or a value of a plugin that is not installed is answered.

    python tools/not_installed.py           writes it
    python tools/not_installed.py --check   fails where it is not as it would be written
"""

import json
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint
from os.path import commonprefix
from pathlib import Path
from typing import Any

from dstrain import TrainConfig
from dstrain.config.fields import own_flags
from dstrain.installed import ABSENT

ROOT = Path(__file__).parents[1]
WIDTH = 88
"""Of a line, about."""


def added(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a plugin adds, by kind and name; of an option, its default."""
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    groups = project.get("entry-points", {})
    found: dict[str, dict[str, Any]] = {}
    for place in groups.get("dstrain.options", {}).values():
        record = EntryPoint("", place, "").load()
        for flag in own_flags(record):
            default = flag.default
            is_plain = default is None or isinstance(default, bool | int | float | str)
            found.setdefault("options", {})[flag.name] = default if is_plain else "[]"
            if "generate" in flag.commands and flag.affects:
                found.setdefault("generate", {})[flag.name] = ""
        for option, names in getattr(record, "choices", {}).items():
            found[option] = dict.fromkeys(sorted(names), "")
        for kind, names in getattr(record, "adds", {}).items():
            found[kind] = dict.fromkeys(sorted(names), "")
    for place in groups.get("dstrain", {}).values():
        forms = getattr(import_module(place), "dstrain_forms", None)
        for form in forms(TrainConfig()) if forms else ():
            found.setdefault("forms", {}).update(dict.fromkeys(form.reads, ""))
    for name in groups.get("dstrain.commands", {}):
        found.setdefault("commands", {})[name] = ""
    for name, place in groups.get("dstrain.models", {}).items():
        first, *others = EntryPoint("", place, "").load().model_files
        owner = first.partition("/")[0] + "/"
        # An owner publishes several families: what its ids of this one begin with.
        ids = [first, *(one for one in others if one.startswith(owner))]
        found["model"] = {name: "", f"{commonprefix(ids)}*": ""}  # noqa: RUF071
    return found


def table() -> str:
    """Return the table as JSON."""
    folders = sorted(one.parent for one in ROOT.glob("plugins/*/pyproject.toml"))
    return as_json({one.name: added(one) for one in folders}) + "\n"


def as_json(value: Any, indent: str = "") -> str:
    """Return JSON with sorted keys, an object on one line where it fits."""
    line = json.dumps(value, sort_keys=True)
    if not isinstance(value, dict) or len(indent) + len(line) < WIDTH:
        return line
    inner = f"{indent} "
    entries = [
        f"{inner}{json.dumps(key)}: {as_json(one, inner)}"
        for key, one in sorted(value.items())
    ]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def main() -> None:
    """Write the table, or compare it."""
    if "--check" not in sys.argv:
        ABSENT.write_text(table(), "utf-8")
    elif ABSENT.read_text("utf-8") != table():
        sys.exit(f"{ABSENT.name} is not as plugins are: python tools/not_installed.py")


if __name__ == "__main__":
    main()
