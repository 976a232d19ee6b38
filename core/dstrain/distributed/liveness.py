"""What the processes of one run share beside their collectives: waiting for each other,
and noticing that one ended.

A collective ends with an error after minutes, while the first process may well read the
files of a data set for hours. So waiting goes through the key-value store that the
processes found each other by: a process is waited for as long as it lives, and no
longer.
"""

import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from dstrain.errors import DstrainError, Interrupted, SystemFault

INTERVAL = 2.0
"""Seconds between two signs of life."""
TIMEOUT = 600.0
"""Seconds without a sign of life after which a process counts as ended; what waits for
a collective is as patient.
"""
ENDED = "another process of the run ended"
LATE = "another process of the run did not answer in time"
FAILED, INTERRUPTED = "failed", "interrupted"
"""Why a process leaves a run before its end."""


def peer_failed(what: str = ENDED) -> SystemFault:
    """The error of a process that cannot go on without the others; `what` says what
    became of them.
    """
    return SystemFault(
        "processes",
        what,
        "if that process could still say why, its message stands beside this one",
        "what was saved is whole: run the same command again, with --resume once there is a checkpoint",
    )


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def should_report(failure: DstrainError) -> bool:
    """Whether this process should print why it ends: of several that say the same only
    one does.

    One that the launcher interrupted, since another had failed, has nothing to add.
    """
    if not launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    with suppress(Exception):  # the launcher may be gone: better said twice than never
        text = (
            INTERRUPTED if isinstance(failure, Interrupted) else str(failure)
        )  # said once, by whoever is first
        store, digest = _store(), hashlib.sha256(text.encode()).hexdigest()
        if isinstance(failure, Interrupted) and store.check([f"{_attempt()}/failed"]):
            return False
        if not isinstance(failure, Interrupted):
            store.set(f"{_attempt()}/failed", "")
        return bool(store.add(f"{_attempt()}/said/{digest}", 1) == 1)
    return True


def ignore_sigterm() -> None:
    """Let the launcher's SIGTERM, which it sends to all when one has failed, not cut
    short the words of one that ends.

    It kills what is left after 30 seconds.
    """
    if launched() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@dataclass
class Heartbeat:
    """One process's part in a run of several; `patience` is in seconds."""

    rank: int
    size: int
    timeout: float = TIMEOUT
    _waits: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._store, own = _store(), _store()
        # Each process counts its runs, so that a script which makes several does not
        # meet its own past.
        self._run = (
            f"{_attempt()}/{self._store.add(f'{_attempt()}/runs/{self.rank}', 1)}"
        )
        self._store.set(
            self._key("place", self.rank), f"{socket.gethostname()} {os.getpid()}"
        )
        self._heard = dict.fromkeys(self._watched(), (0, time.monotonic()))
        threading.Thread(
            target=self._beat, args=(own,), name="dstrain-beat", daemon=True
        ).start()

    def wait(self) -> None:
        """Wait until every process is here; raises SystemFault if one of them has
        ended.
        """
        self._waits += 1
        self._meet("here")
        self._meet(
            "seen"
        )  # the store may live in the first process, so nobody may leave while another still looks

    def leave(self, why: str = "") -> None:
        """Stop to give signs of life; those who wait for a process that FAILED or was
        INTERRUPTED learn so at once.
        """
        self._done.set()
        if why:
            with suppress(Exception):  # the store may be what failed
                self._store.compare_set(self._key("ended"), "", why)

    def peer_lost(self) -> bool:
        """Whether another process failed, or of this machine is gone, and not since it
        was interrupted as this one.
        """
        with suppress(Exception):
            why = self._why()
            return why == FAILED or (
                why != INTERRUPTED
                and any(self._is_gone(rank) for rank in range(self.size))
            )
        return False

    def peer_interrupted(self) -> bool:
        """Whether another process left since it was asked to stop."""
        with suppress(Exception):
            return self._why() == INTERRUPTED
        return False

    def _why(self) -> str:
        """Why the first process that left did so; '' while all are in the run."""
        key = self._key("ended")
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _meet(self, turn: str) -> None:
        keys = [self._key(turn, self._waits, rank) for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], "")
            self._until(keys)
        except (
            RuntimeError
        ) as error:  # of the store: the process that holds it has ended
            raise peer_failed() from error

    def _until(self, keys: Sequence[str]) -> None:
        """Wait until every process, in order of rank, has set its key."""
        pause, listened = 0.005, time.monotonic()
        while not self._store.check(list(keys)):
            why = self._why()
            if why:
                raise KeyboardInterrupt if why == INTERRUPTED else peer_failed()
            if time.monotonic() - listened > INTERVAL:
                listened = time.monotonic()
                self._listen(
                    [
                        rank
                        for rank, key in enumerate(keys)
                        if not self._store.check([key])
                    ]
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _listen(self, missing: Sequence[int]) -> None:
        """Raise SystemFault if one of the missing processes is gone, or gave no sign of
        life for too long.
        """
        for rank in missing:
            if self._is_gone(rank):
                raise peer_failed()
        for rank in self._watched():
            beats, since = self._heard[rank]
            now = self._store.add(self._key("beats", rank), 0)
            if now != beats:
                self._heard[rank] = (now, time.monotonic())
            elif rank in missing and time.monotonic() - since > self.timeout:
                raise peer_failed(
                    f"nothing was heard of process {rank} for {self.timeout:.0f} seconds"
                )

    def _watched(self) -> Sequence[int]:
        """The first process listens to all, the others to it: what it notices ends them
        too.
        """
        return range(1, self.size) if self.rank == 0 else (0,)

    def _is_gone(self, rank: int) -> bool:
        """Whether a process ran on this machine and does so no more."""
        key = self._key("place", rank)
        if rank == self.rank or not self._store.check([key]):
            return False
        host, _, number = self._store.get(key).decode().rpartition(" ")
        if host != socket.gethostname():
            return False
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def _beat(self, store: Any) -> None:
        with suppress(
            RuntimeError
        ):  # the store is gone, which whoever waits notices too
            while not self._done.wait(INTERVAL):
                store.add(self._key("beats", self.rank), 1)

    def _key(self, *parts: object) -> str:
        return "/".join([self._run, *map(str, parts)])


def _attempt() -> str:
    """A launcher that starts a run again after a failure may keep the store."""
    return f"dstrain/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported explicitly

    place, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(place, port, is_master=False, timeout=timedelta(seconds=30))


def peer_failure(error: BaseException) -> str:
    """What an error of a collective says of the other processes; '' if it is none."""
    from torch.distributed import DistError

    text = str(error)
    if not isinstance(error, RuntimeError) or not (
        isinstance(error, DistError) or "gloo" in text
    ):
        return ""
    return LATE if "imed out" in text or "imeout" in text else ENDED
