"""Signals: a training loop asked to stop does so at the next step boundary; anything
else ends where it stands.

SIGHUP (the terminal went away) is as SIGTERM, unless it is ignored, as under `nohup`.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from dstrain.distributed.liveness import launched
from dstrain.errors import Interrupted

Handler = Callable[[int, FrameType | None], None]
SAME = 3.0
"""Seconds within which signals are one to a process of several: the terminal's Ctrl-C
reaches it, and its launcher, which passes it on.
"""


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a signal came; a second signal then acts as it
    does without this.

    Outside the main thread, where Python takes no signals, nothing is changed.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    with _handled(note):
        yield lambda: bool(came)


@contextmanager
def interrupt_on_signals(what: str, advice: str) -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end things as SIGINT does: as KeyboardInterrupt, and
    outside as Interrupted.

    What is being written is then taken back as for any error. A second signal kills the
    process. what, advice: what Interrupted says, where nothing within says it better.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        with _handled(end, then=signal.SIG_DFL):
            yield
    except KeyboardInterrupt as error:
        raise Interrupted("dstrain", what, advice) from error


@contextmanager
def _handled(handler: Handler, then: signal.Handlers | None = None) -> Iterator[None]:
    """Handle the first signal by `handler`; before it is called, what was there, or
    `then`, is put back.
    """
    taken = (
        [signal.SIGTERM, signal.SIGINT]
        if threading.current_thread() is threading.main_thread()
        else []
    )
    if taken and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        taken.append(signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in taken}
    came: list[float] = []

    def first(number: int, frame: FrameType | None) -> None:
        came.append(time.monotonic())
        if launched() and len(came) > 1 and came[-1] - came[0] < SAME:
            return
        if not launched() or len(came) > 1:
            for each, earlier in before.items():
                signal.signal(each, earlier if then is None else then)
        if len(came) > 1:
            signal.raise_signal(number)
        else:
            handler(number, frame)

    for number in taken:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # by `finish_in_peace`
                signal.signal(number, handler_before)
