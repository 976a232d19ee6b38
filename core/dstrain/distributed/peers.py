"""Tell how the processes of a launcher end, and which of them reports it."""

import hashlib
import os
import signal
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

from dstrain.errors import DstrainError, Interrupted, SystemFault

ENDED = "another process of the run ended"
LATE = "another process of the run did not answer in time"
INTERRUPTED = "interrupted"


def peer_failed(what: str = ENDED) -> SystemFault:
    """Return the error of a process that cannot continue without the others."""
    return SystemFault(
        "processes",
        what,
        "if that process could report why, its own message says so",
        "everything saved so far is complete",
    )


def launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def should_report(error: DstrainError) -> bool:
    """Return whether this process prints the error: of those that fail with the same
    message only one does, and none that the launcher interrupted because another
    failed.
    """
    if not launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    # The launcher, which holds the store, may be gone: better printed twice than never.
    with suppress(Exception):
        store = store_of_run()
        failed = f"{attempt()}/failed"
        text = str(error)
        if isinstance(error, Interrupted):
            if store.check([failed]):
                return False
            # Printed once, by whoever is first: each says where it stopped.
            text = INTERRUPTED
        else:
            store.set(failed, "")
        digest = hashlib.sha256(text.encode()).hexdigest()
        return bool(store.add(f"{attempt()}/said/{digest}", 1) == 1)
    return True


def ignore_sigterm() -> None:
    """Ignore the SIGTERM that a launcher sends to every process when one has failed.

    It would cut off the message of a process that is about to end. The launcher kills
    what is left after 30 seconds.
    """
    if launched() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def attempt() -> str:
    """Return what keys in the store begin with."""
    # A launcher that starts a run again after a failure may keep the store.
    return f"dstrain/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def store_of_run() -> Any:
    """Connect to the store that the launcher holds."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported explicitly

    place = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return TCPStore(place, port, is_master=False, timeout=timedelta(seconds=30))


def peer_failure(error: BaseException) -> str:
    """Return what an error of a collective says about the other processes; '' for
    another one.
    """
    from torch.distributed import DistError

    text = str(error)
    # Gloo raises plain RuntimeErrors, which only their text tells from others.
    collective = isinstance(error, DistError) or "gloo" in text
    if not isinstance(error, RuntimeError) or not collective:
        return ""
    return LATE if "imed out" in text or "imeout" in text else ENDED
