"""Let the processes of a run wait for each other, and notice when one ended or hangs.

A collective fails after minutes, while the main process may read a dataset's files for
hours. So processes wait through the key-value store that they found each other by, for
a process as long as it lives.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dstrain.console import get_logger
from dstrain.distributed.peers import INTERRUPTED, attempt, peer_failed, store_of_run
from dstrain.storage.temporaries import process_exists

logger = get_logger(__name__)

INTERVAL = 2.0
"""Seconds between two signs of life."""
TIMEOUT = 600.0
"""Seconds without a sign of life after which a process counts as ended."""
# Why a process leaves a run before its end:
FAILED = "failed"


@dataclass
class Heartbeat:
    """One process's signs of life in a run of several, and its view of the others."""

    rank: int
    size: int
    timeout: float = TIMEOUT
    """Seconds without a sign of life after which a process counts as ended."""
    _met: int = 0
    """How often all have met: who leaves says after which meeting, and ends none before."""
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # The thread has a connection of its own: a blocked one blocks no sign of life.
        self._store = store_of_run()
        # Each process counts its runs, so that a script which makes several does not
        # find the keys of an earlier one.
        number = self._store.add(f"{attempt()}/runs/{self.rank}", 1)
        self._run = f"{attempt()}/{number}"
        self._store.set(
            self._key("place", self.rank), f"{socket.gethostname()} {os.getpid()}"
        )
        self._heard = dict.fromkeys(self._watched(), (0, time.monotonic()))
        threading.Thread(
            target=self._beat,
            args=(store_of_run(),),
            name="dstrain-heartbeat",
            daemon=True,
        ).start()

    def wait(self) -> None:
        """Wait until every process is here; raises SystemFault if one has ended."""
        self._rendezvous("here")
        # The store may live in the first process, which therefore leaves when the others
        # look no more: they say so, and do not look who else has.
        self._rendezvous("seen")
        self._met += 1

    def leave(self, why: str = "") -> None:
        """Stop giving signs of life; those who wait for this process learn at once why."""
        self._done.set()
        if why:
            with suppress(Exception):  # the store may be what failed
                # In the last meeting of all, the others may be on their way to the next.
                for meeting in (self._met, self._met + 1):
                    self._store.compare_set(self._key("ended", meeting), "", why)

    def peer_ended(self) -> str:
        """Return why another process left the run, '' if none has; FAILED for one that
        disappeared.
        """
        with suppress(Exception):
            gone = any(map(self._is_gone, range(self.size)))
            return self._read("ended", self._met) or (FAILED if gone else "")
        return ""

    def _rendezvous(self, turn: str) -> None:
        keys = [self._key(turn, self._met, rank) for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], "")
            if turn == "here" or self.rank == 0:
                self._wait_for(keys)
        except RuntimeError as error:
            # The store's own error: the process that holds it has ended.
            raise peer_failed() from error

    def _wait_for(self, keys: list[str]) -> None:
        """Wait until every process, in order of rank, has set its key."""
        pause = 0.005
        start = listened = time.monotonic()
        said = 0
        while not (why := self._read("ended", self._met)) and not self._store.check(
            keys
        ):
            if time.monotonic() - listened > INTERVAL:
                listened = time.monotonic()
                missing = [
                    r for r, key in enumerate(keys) if not self._store.check([key])
                ]
                self._listen(missing)
                # They are alive, and may have much to do, or may hang.
                if missing and listened - start > (said + 1) * self.timeout:
                    said += 1
                    names = ", ".join(map(self._name, missing))
                    logger.warning(
                        f"waiting for {said * self.timeout:.0f} seconds for {names}"
                    )
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        if why:
            raise KeyboardInterrupt if why == INTERRUPTED else peer_failed()

    def _listen(self, missing: Sequence[int]) -> None:
        """Raise SystemFault if a missing process is gone, or silent for too long."""
        for rank in missing:
            if self._is_gone(rank):
                raise peer_failed()
        for rank in self._watched():
            beats, since = self._heard[rank]
            now = self._store.add(self._key("beats", rank), 0)
            if now != beats:
                self._heard[rank] = (now, time.monotonic())
            elif rank in missing and time.monotonic() - since > self.timeout:
                silence = f"has not responded for {self.timeout:.0f} seconds"
                raise peer_failed(f"{self._name(rank)} {silence}")

    def _watched(self) -> Sequence[int]:
        """Return the ranks that this process listens to: the first one to all, the
        others to it.
        """
        return range(1, self.size) if self.rank == 0 else (0,)

    def _is_gone(self, rank: int) -> bool:
        """Return whether a process ran on this machine and no longer does."""
        host, _, number = self._read("place", rank).rpartition(" ")
        return host == socket.gethostname() and not process_exists(int(number))

    def _beat(self, store: Any) -> None:
        # Where the store is gone, whoever waits notices it too.
        with suppress(RuntimeError):
            while not self._done.wait(INTERVAL):
                store.add(self._key("beats", self.rank), 1)

    def _name(self, rank: int) -> str:
        host, _, number = self._read("place", rank).rpartition(" ")
        if not number:
            return f"process {rank}, which has not begun"
        return f"process {rank} (process id {number} on {host})"

    def _read(self, *parts: object) -> str:
        """Return the value of a key, '' without one."""
        key = self._key(*parts)
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _key(self, *parts: object) -> str:
        return "/".join([self._run, *map(str, parts)])
