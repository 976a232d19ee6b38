"""A section of the dry run: what the steps will cost."""

from dstrain.plugin import PlannedRun, Section, hookimpl

api = 2
PRICE = 0.5
"""Cents per step."""


@hookimpl
def dstrain_dry_run(planned: PlannedRun) -> list[Section]:
    if planned.steps is None:
        return []
    cents = planned.steps * PRICE
    return [Section("Price", [f"{cents:g} cents"], {"cents": cents})]
