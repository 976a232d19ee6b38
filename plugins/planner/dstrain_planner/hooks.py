"""What this package adds to `dstrain`. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dstrain.plugin import Section, hookimpl

if TYPE_CHECKING:
    from dstrain.plugin import PlannedRun

api = 2


@hookimpl
def dstrain_dry_run(planned: PlannedRun) -> Sequence[Section]:
    """Return what the run needs in memory and on disk, and whether it fits."""
    from dstrain_planner.memory.report import sections

    return [*sections(planned)]
