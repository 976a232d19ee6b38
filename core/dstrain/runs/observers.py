"""Call what watches a run: core's own observers first, then those of plugins by name.

The loop knows neither files, nor what is shown, nor where numbers are sent.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.console import get_logger
from dstrain.distributed import ProcessGroup, is_interrupt
from dstrain.errors import Interrupted, UsageError
from dstrain.installed import described
from dstrain.registry import Extensions
from dstrain.runs.watched_run import INTERRUPT, Observer, WatchedRun

logger = get_logger(__name__)

SLOW = 0.05
"""From this share of the time on, the summary names a plugin's observer."""


@dataclass(eq=False)
class Watcher:
    """An observer in one process of a run."""

    observer: Observer
    plugin: str = ""
    """Whose it is, in words; '' for those of the core, whose errors end the run."""
    name: str = ""
    """The name by which the state of a plugin's is kept."""
    is_waited_for: bool = False
    """Whether other processes have it, too, and may wait for this one."""
    seconds: float = 0.0
    """How long the methods of a plugin's took."""
    is_disabled: bool = False

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; the first of a plugin's that raises disables the observer, with a
        warning, or ends the run if other processes wait for it.
        """
        if self.is_disabled:
            return None
        if not self.plugin:
            return getattr(self.observer, method)(*arguments)
        start = time.perf_counter()
        try:
            return getattr(self.observer, method)(*arguments)
        except (Exception, SystemExit) as error:
            self.disable(method, error)
            return None
        finally:
            self.seconds += time.perf_counter() - start

    def disable(self, method: str, error: BaseException) -> None:
        """Call the observer no more, and say why; raises UsageError if others wait for it."""
        self.is_disabled = True
        what = f"{type(self.observer).__name__}.{method} raised {described(error)}"
        if self.is_waited_for:
            raise UsageError(self.plugin, what) from error
        logger.warning(f"{self.plugin} disabled: {what}")


class Observers:
    """The observers of one process of a run."""

    def __init__(
        self,
        run: WatchedRun,
        processes: ProcessGroup,
        own: Sequence[Observer],
        plugins: Sequence[Watcher] = (),
        states: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Call those of the core, then those of plugins.

        states: What those of plugins had kept when the state was saved that the run resumes.
        """
        self.run = run
        self.processes = processes
        self.states = states
        self.all: list[Watcher] = []
        self._waiting: list[Mapping[str, Any]] = []
        """What was reported, until all have looked at the step."""
        for one in (*map(Watcher, own), *plugins):
            if run.is_main or one.observer.everywhere:
                one.is_waited_for = one.observer.everywhere and processes.size > 1
                self.all.append(one)

    @contextmanager
    def watching(self, is_stopping: Callable[[], bool]) -> Iterator[None]:
        """Start all observers, and end them however the block ends."""
        run = self.run
        run.is_stopping = is_stopping
        run.report = self._report
        begun = time.perf_counter()
        started: list[Watcher] = []
        try:
            for one in self.all:
                # It may have opened something when it raises.
                started.append(one)
                if one.name in self.states:
                    one.call("load", self.states[one.name])
                one.call("start", run)
            self._show_reports()
            yield
        except BaseException as error:
            is_asked = isinstance(error, Interrupted) or is_interrupt(error)
            how = "interrupted" if is_asked else "failed"
            run.message = str(error) or type(error).__name__
            for one in started:
                # The first error is the one to tell.
                try:
                    one.call("end", run, how)
                except Exception as another:
                    logger.warning(f"{type(another).__name__}: {another}")
            raise
        how = "finished" if run.step >= run.total_steps else "stopped"
        self._call("end", how)
        took = time.perf_counter() - begun
        for one in self.all:
            if one.seconds > SLOW * took:
                share = f"{one.seconds / took:.0%} of the time"
                logger.info(
                    f"{one.plugin}: its {type(one.observer).__name__} took {share}"
                )

    def _call(self, method: str, given: Any) -> None:
        for one in self.all:
            one.call(method, self.run, given)

    def step(self, numbers: Mapping[str, float]) -> None:
        """Show a step's numbers, which no observer can change."""
        self.run.step = int(numbers["step"])
        self._call("step", MappingProxyType(dict(numbers)))
        self._show_reports()

    def saved(self, files: Sequence[Path]) -> None:
        """Show the weights that were saved."""
        self._call("saved", files)
        self._show_reports()

    def _report(self, values: Mapping[str, Any]) -> None:
        # Copied here, so that whoever reports what is no mapping is the one to fail.
        self._waiting.append(dict(values))

    def _show_reports(self) -> None:
        # What is reported meanwhile waits for the next step: it might never end.
        waiting = self._waiting[:]
        self._waiting.clear()
        for values in waiting:
            self._call("reported", values)

    def agree(self) -> frozenset[str]:
        """Return what was asked for in any process since the last call, the same in each."""
        run = self.run
        asked = frozenset(run.requests)
        run.requests -= asked
        if run.is_stopping():
            asked |= {INTERRUPT}
        # One number per step, as signals need it; names only where there are any.
        is_asked = self.processes.any(bool(asked))
        run.asked = self.processes.union(asked) if is_asked else frozenset()
        return run.asked

    def kept(self) -> dict[str, Any]:
        """Return what the observers of plugins keep in a state, by name."""
        found = {}
        for one in self.all:
            state = one.call("state") if one.plugin else None
            if state is None:
                continue
            try:
                found[one.name] = json.loads(json.dumps(state, allow_nan=False))
            except (TypeError, ValueError) as error:
                one.disable("state", error)
        return found


def plugin_observers(extensions: Extensions, run: WatchedRun) -> list[Watcher]:
    """Return the observers that plugins offer for a run, in the order of their names."""
    found: list[Watcher] = []
    answers = extensions.answers("dstrain_observers", Observer, run=run)
    for plugin, item in answers:
        name = f"{plugin.name}/{type(item).__name__}"
        if any(one.name == name for one in found):
            own = f"{plugin.name}/"
            name = f"{name} {sum(one.name.startswith(own) for one in found)}"
        found.append(Watcher(item, plugin.where, name))
    return found
