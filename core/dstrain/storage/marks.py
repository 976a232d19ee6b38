"""Say in a small file which process uses a folder, so that other machines can see it.

A mark names its process and machine, and is touched every `BEAT` seconds. It goes when
its process is done. One that was killed leaves its mark, and others find out that it is
dead: on its own machine by the process id, elsewhere by the time of the mark.
"""

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

BEAT = 20.0
"""Seconds between two touches of a mark."""
SILENT = 600.0
"""Seconds without a touch after which a process of another machine counts as dead; more
than the clocks of two machines may differ by."""
MOST_BYTES = 1024
"""A mark is shorter."""


@dataclass(frozen=True)
class Mark:
    """Who made a mark."""

    host: str
    machine: str
    """Where the process id means something; see `this_machine`."""
    process_id: int
    started: float
    """When the process started, which tells it from a later one with its id."""
    name: str
    """Different for each mark."""

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}"


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine is running."""
    # Late, for it is needed only where processes wait for each other.
    import psutil

    return bool(psutil.pid_exists(pid))


def this_machine() -> str:
    """Return what tells this machine from others, also those of the same host name, and
    a container from another on the same machine: 8 hex digits.
    """
    parts = [socket.gethostname()]
    # A container has process ids of its own, and often the host name of others. Only
    # Linux has these files.
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()


def write_mark(path: Path) -> Mark:
    """Make the mark of this process; raises FileExistsError if there is one, OSError.

    Of several that try at once one succeeds, also on NFS from version 3.
    """
    import psutil

    mark = Mark(
        socket.gethostname(),
        this_machine(),
        os.getpid(),
        psutil.Process().create_time(),
        uuid4().hex,
    )
    with path.open("x", encoding="utf-8") as file:
        json.dump(asdict(mark), file)
        file.flush()
        os.fsync(file.fileno())
    return mark


def read_mark(path: Path) -> Mark | None:
    """Return a mark; None if there is none, or it has just been created.

    Raises ValueError for a file that is no mark.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if not content:
        return None
    try:
        mark = Mark(**json.loads(content))
    except TypeError as error:
        raise ValueError(f"{path} is no mark") from error
    if not isinstance(mark.process_id, int) or not isinstance(mark.started, float):
        raise ValueError(f"{path} is no mark")
    return mark


def remove_mark(path: Path, mark: Mark | None) -> None:
    """Remove a mark, unless another one is in its place; raises OSError."""
    if read_mark(path) == mark:
        path.unlink(missing_ok=True)


def is_alive(path: Path, mark: Mark | None) -> bool:
    """Return whether the process of a mark lives, as far as can be known from here."""
    if mark is None or mark.machine != this_machine():
        return silence(path) < SILENT
    import psutil

    try:
        # Another process may have its id by now.
        return bool(psutil.Process(mark.process_id).create_time() == mark.started)
    except psutil.NoSuchProcess:
        return False


def silence(path: Path) -> float:
    """Return for how many seconds a file was not touched; without end if it is gone."""
    try:
        return time.time() - touched(path)
    except FileNotFoundError:
        return float("inf")


def touched(path: Path) -> float:
    """Return when a file or folder was touched; raises OSError."""
    if path.is_file():
        # Opened, since network file systems remember the times of files that are not.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    return path.lstat().st_mtime


@contextmanager
def kept_alive(path: Path, mark: Mark) -> Iterator[None]:
    """Touch a mark of this process inside, and remove it at the end."""
    done = threading.Event()

    def touch() -> None:
        # A file system that does not answer for a while is no reason to end.
        while not done.wait(BEAT):
            with suppress(OSError, ValueError):
                if read_mark(path) == mark:
                    os.utime(path)

    # In a thread, which lives and dies with the process, and which forks do not have.
    threading.Thread(target=touch, name="dstrain-mark", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        with suppress(OSError, ValueError):
            remove_mark(path, mark)
