"""SIGTERM and SIGINT ask a run to stop; it does so at the next step boundary, where everything can be saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a signal came; a second signal then acts as it does without this.

    Outside the main thread, where Python takes no signals, nothing is changed.
    """
    came: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in signals:
        signal.signal(number, note)
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
