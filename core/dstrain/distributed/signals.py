"""Handle signals: a training loop that is asked to stop does so after the current step.

Anything else ends where it stands. SIGHUP (the terminal was closed) acts as SIGTERM,
unless it is ignored, as under `nohup`; Windows has none.
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
"""Seconds within which signals count as one in a process of several: the terminal's
Ctrl-C reaches it, and its launcher, which passes it on.
"""


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a signal came; a second one acts as usual.

    Nothing changes outside the main thread, where Python takes no signals.
    """
    asked = threading.Event()
    with _handled(lambda number, frame: asked.set()):
        yield asked.is_set


@contextmanager
def interrupt_on_signals(what: str, advice: str) -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt inside, and into Interrupted
    outside.

    So files that are being written are cleaned up as after any error. A second signal
    kills the process.

    Args:
        what: What Interrupted says, unless something inside says it better.
        advice: The next step that it names.
    """
    try:
        with _handled(signal.default_int_handler, then=signal.SIG_DFL):
            yield
    except KeyboardInterrupt as error:
        raise Interrupted("dstrain", what, advice) from error


@contextmanager
def _handled(handler: Handler, then: signal.Handlers | None = None) -> Iterator[None]:
    """Handle the first signal by `handler`, after restoring the earlier handlers, or
    `then` in their place.
    """
    before = {number: signal.getsignal(number) for number in _stop_signals()}
    came: list[float] = []

    def first(number: int, frame: FrameType | None) -> None:
        came.append(time.monotonic())
        again = len(came) > 1
        if launched() and again and came[-1] - came[0] < SAME:
            return
        # In a process of several the handler stays for the copies of this signal.
        if again or not launched():
            for each, earlier in before.items():
                signal.signal(each, earlier if then is None else then)
        if again:
            signal.raise_signal(number)
        else:
            handler(number, frame)

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, earlier in before.items():
            # Ignored by `ignore_sigterm`, which must outlast this.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, earlier)


def _stop_signals() -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    numbers = [signal.SIGTERM, signal.SIGINT]
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        numbers.append(hangup)
    return numbers
