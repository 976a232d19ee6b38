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

from dstrain.distributed.peers import launched
from dstrain.errors import Interrupted

Handler = Callable[[int, FrameType | None], None]
SAME = 3.0
"""Seconds within which signals count as one in a process of several: the terminal's
Ctrl-C reaches it, and its launcher, which passes it on.
"""
_raised = threading.Event()
"""Whether a signal has raised KeyboardInterrupt."""


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a signal came; a second one acts as usual.

    Do nothing outside the main thread, the only one in which Python handles signals.
    """
    asked = threading.Event()
    with _handled(lambda number, frame: asked.set()):
        yield asked.is_set


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt inside, and into Interrupted
    outside, unless something inside says it better.

    So files that are being written are cleaned up as after any error. A second signal
    kills the process.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        _raised.set()
        raise KeyboardInterrupt

    try:
        with _handled(interrupt, then=signal.SIG_DFL):
            yield
    except BaseException as error:
        if not is_interrupt(error):
            raise
        advice = "run the same command again"
        raise Interrupted("command", "interrupted", advice) from error
    finally:
        _raised.clear()


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is the interrupt of a signal, or stands in its place.

    While safetensors reads a tensor, torch turns a KeyboardInterrupt into a ValueError.
    """
    replaced = _raised.is_set() and isinstance(error, ValueError | RuntimeError)
    return replaced or isinstance(error, KeyboardInterrupt)


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
            # Copies of a signal may still come, and `ignore_sigterm` must outlast this.
            changed = came or signal.getsignal(number) is not first
            if not (launched() and changed):
                signal.signal(number, earlier)


def _stop_signals() -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    numbers = [signal.SIGTERM, signal.SIGINT]
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        numbers.append(hangup)
    return numbers
