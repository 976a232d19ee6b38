"""Take items of an iterator in a thread, while others are used."""

from collections.abc import Iterable, Iterator
from queue import Empty, Queue
from threading import Event, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")

END_PATIENCE = 3.0
"""Seconds that the end waits for an item in the making. A thread that reads from a dead
disk cannot be ended; it ends with the process.
"""


class NotReady(Exception):
    """Nothing came in a time."""


class ReadAhead(Iterator[Item], Generic[Item]):
    """The items of an iterator, in their order; an error comes in the place of the item
    that raised it.
    """

    def __init__(self, items: Iterable[Item], ahead: int, poll: float) -> None:
        """Start the thread.

        Args:
            items: What the thread takes items of.
            ahead: Most items that wait to be used; one more is in the making.
            poll: Seconds after which the wait for an item raises NotReady, so that one
                can look for signals and wait again.
        """
        self._poll = poll
        self._ready: Queue[tuple[Item | None, BaseException | None]] = Queue(ahead)
        self._closed = Event()
        self._thread = Thread(target=self._take, args=(items,), daemon=True)
        self._thread.start()

    def _take(self, items: Iterable[Item]) -> None:
        end: BaseException = StopIteration()
        try:
            for item in items:
                self._ready.put((item, None))
                if self._closed.is_set():
                    return
        except BaseException as error:
            end = error
        self._ready.put((None, end))

    def __next__(self) -> Item:
        """Return the next item, or raise the error that came instead, or NotReady."""
        try:
            item, error = self._ready.get(timeout=self._poll)
        except Empty:
            raise NotReady from None
        if error is not None:
            # Asked again, an iterator says again that it has ended.
            self._ready.put((None, StopIteration()))
            raise error
        return item  # type: ignore[return-value]  # there is one where there is no error

    def close(self) -> None:
        """End the thread; items that wait are dropped."""
        self._closed.set()
        while True:
            try:
                # The thread may wait for room.
                self._ready.get_nowait()
            except Empty:
                break
        self._thread.join(END_PATIENCE)
