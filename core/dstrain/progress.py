"""Progress for people: a bar on a terminal, one line a minute elsewhere; on the main process alone."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

SECONDS_PER_LINE = 60.0


class Progress:
    """Counts work done; a context manager. `total` and `done` are in the unit the title names.

    brief: what passes inside other work: its bar vanishes, and elsewhere than on a terminal its end is not told.
    """

    def __init__(self, title: str, total: int, done: int = 0, enabled: bool = True, brief: bool = False) -> None:
        self.title, self.total, self.done, self.first, self.brief = title, total, done, done, brief
        self.terminal = sys.stderr.isatty()
        self.enabled = enabled
        self.bar = tqdm(total=total, initial=done, desc=title, disable=not (enabled and self.terminal),
                        file=sys.stderr, leave=not brief)  # fmt: skip
        self.start = self.said = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled and not self.terminal and not self.brief and kind is None:
            self._say()
        self.bar.close()

    def step(self, note: str = "") -> None:
        """Count one more, with a note such as the loss."""
        self.done += 1
        if self.terminal:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update()
        elif self.enabled and time.monotonic() - self.said >= SECONDS_PER_LINE:
            self._say(note)

    def _say(self, note: str = "") -> None:
        now = time.monotonic()
        rate = (self.done - self.first) / max(now - self.start, 1e-9)
        left = f", {clock((self.total - self.done) / rate)} left" if rate and self.done < self.total else ""
        words = f"{self.title} {self.done}/{self.total}, {rate:.2f}/s{left}"
        print(f"{words} {note}".rstrip(), file=sys.stderr, flush=True)
        self.said = now


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
