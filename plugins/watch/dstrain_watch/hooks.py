"""What this package adds to `dstrain`. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dstrain.plugin import PromptRow, hookimpl

from dstrain_watch.options import WatchOptions

if TYPE_CHECKING:
    from dstrain.plugin import Observer, TrainConfig, WatchedRun

api = 2


@hookimpl
def dstrain_rows(options: TrainConfig) -> Sequence[PromptRow]:
    """Return the prompts of previews."""
    from dstrain_watch.previews import prompt_row

    return [prompt_row(text) for text in options.of(WatchOptions).preview_prompt]


@hookimpl
def dstrain_observers(run: WatchedRun) -> Sequence[Observer]:
    """Return previews and trackers, where a run asks for them."""
    from dstrain_watch.previews import Previews
    from dstrain_watch.sending import Trackers

    if run.config is None:
        return []
    options = run.config.of(WatchOptions)
    found: list[Observer] = []
    if options.preview_prompt and run.images is not None:
        found.append(
            Previews(run.images, options.preview_steps, options.preview_at_start)
        )
    if options.trackers:
        found.append(Trackers(options))
    return found
