"""`dstrain cache ls`: what a feature cache contains, and what uses it."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.cache.addresses import Numbers
from dstrain.cache.commands.contents import Contents, PlanContents, open_contents
from dstrain.cache.in_use import READING
from dstrain.config import as_size
from dstrain.console import as_table, number_of

NAME_LENGTH = 8
"""Characters of a plan's name that are shown, and with which it can be named."""


def listing(folder: Path) -> dict[str, Any]:
    """Return what a feature cache contains as JSON data: bytes, values by name, plans.

    Raises StateError if it is no cache, or is damaged, and while values are removed from
    it.
    """
    with open_contents(folder) as contents:
        return _listing(folder, contents)


def _listing(folder: Path, contents: Contents) -> dict[str, Any]:
    unused = ~contents.used_by(contents.plans)
    uses = np.zeros(len(contents.addresses), np.int64)
    for plan in contents.plans:
        uses[plan.used] += 1
    return {
        "cache": str(folder),
        "rows": _rows(contents),
        "values": len(contents.addresses),
        "bytes": int(contents.nbytes.sum()),
        "bytes_on_disk": _bytes_on_disk(folder),
        "shards": len(contents.shards),
        "used_by_several_plans": _count(contents, uses > 1),
        "used_by_no_plan": _count(contents, unused),
        "units": list(_units(contents)),
        "plans": [_plan(contents, plan) for plan in contents.plans],
    }


def _bytes_on_disk(folder: Path) -> int:
    """Return the bytes of all files below a folder, but for the marks of readers."""
    total = 0
    for path in folder.rglob("*"):
        # Stage 1 may be writing to the cache, and rename its files.
        with suppress(FileNotFoundError):
            if path.is_file() and not path.name.startswith(READING):
                total += path.stat().st_size
    return total


def as_lines(found: Mapping[str, Any]) -> str:
    """Write a listing for people."""
    count = number_of(found["rows"], "row")
    shards = number_of(found["shards"], "shard")
    lines = [
        f"{found['cache']}: {count}, {_counted(found)} in {shards}"
        f" ({as_size(found['bytes_on_disk'])} on disk)"
    ]
    if found["units"]:
        head = ("value", "unit", "samples", "values", "bytes", "mean", "shared")
        rows = [
            (
                one["value"],
                one["unit"],
                f"{one['samples']:,}",
                f"{one['values']:,}",
                as_size(one["bytes"]),
                as_size(one["mean_bytes"]),
                f"{one['used_by_several_samples']:,}",
            )
            for one in found["units"]
        ]
        lines += ["", as_table(head, rows)]
    if found["plans"]:
        head = ("plan", "model", "task", "rows", "bytes", "made", "dataset")
        rows = [
            (
                one["name"][:NAME_LENGTH],
                f"{one['model']} {one['variant']}",
                one["task"] + (f" ({one['use']})" if one["use"] else ""),
                f"{one['rows']:,}",
                as_size(one["bytes"]),
                one["made"][:16].replace("T", " "),
                one["dataset"],
            )
            for one in found["plans"]
        ]
        lines += ["", as_table(head, rows)]
    lines.append("")
    shared = found["used_by_several_plans"]
    if shared["values"]:
        lines.append(f"used by several plans: {_counted(shared)}")
    lines.append(f"used by no plan: {_counted(found['used_by_no_plan'])}")
    return "\n".join(lines)


def _units(contents: Contents) -> Iterator[dict[str, Any]]:
    """Yield a record of each name that values have in plans."""
    columns: dict[tuple[str, str], list[Numbers]] = {}
    for plan in contents.plans:
        for name, numbers in plan.values.items():
            stored = numbers[numbers >= 0]
            if len(stored):
                columns.setdefault((plan.unit_of(name), name), []).append(stored)
    for (unit, name), parts in sorted(columns.items()):
        samples = sum(map(len, parts))
        values = np.unique(np.concatenate(parts))
        nbytes = int(contents.nbytes[values].sum())
        counts_of = [np.unique(part, return_counts=True) for part in parts]
        several = [numbers[counts > 1] for numbers, counts in counts_of]
        yield {
            "value": name,
            "unit": unit,
            "samples": samples,
            "values": len(values),
            "bytes": nbytes,
            "mean_bytes": nbytes // len(values),
            "used_by_several_samples": len(np.unique(np.concatenate(several))),
        }


def _plan(contents: Contents, plan: PlanContents) -> dict[str, Any]:
    stored = plan.stored
    identity = stored.identity
    made = datetime.fromtimestamp(stored.path.stat().st_mtime)
    return {
        "name": stored.name,
        "model": identity["family"],
        "variant": identity["variant"],
        "task": identity["task"],
        "use": stored.use,
        "rows": len(np.unique(plan.rows)),
        "samples": len(plan.rows),
        "prompt_rows": len(stored.info.prompt_rows),
        "dataset": stored.info.dataset["path"],
        "made": made.isoformat(timespec="seconds"),
        "bytes": int(contents.nbytes[plan.used].sum()),
    }


def _rows(contents: Contents) -> int:
    """Count the rows of all datasets; plans of one dataset share them."""
    columns: dict[str, list[Numbers]] = {}
    for plan in contents.plans:
        columns.setdefault(plan.stored.info.dataset["sha256"], []).append(plan.rows)
    return sum(len(np.unique(np.concatenate(parts))) for parts in columns.values())


def _count(contents: Contents, chosen: Any) -> dict[str, int]:
    return {"values": int(chosen.sum()), "bytes": int(contents.nbytes[chosen].sum())}


def _counted(found: Mapping[str, Any]) -> str:
    values = number_of(found["values"], "value")
    return f"{values}, {as_size(found['bytes'])}"
