"""Say in a small file which process uses a folder, so that other machines can see it.

A mark names its process and machine, and is touched every `BEAT` seconds. It goes when
its process is done. One that was killed leaves its mark, and others find out that it is
dead: on its own machine by the process id, elsewhere by the time of the mark.

On a full disk a mark cannot name its process. It is then a file of NUL bytes, which takes
no space, and counts by its time alone.
"""

import errno
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

BEAT = 20.0
"""Seconds between two touches of a mark."""
SILENT = 600.0
"""Seconds without a touch after which a process of another machine counts as dead; more
than the clocks of two machines may differ by."""
MOST_BYTES = 1024
"""A mark is shorter."""
MOST_PROCESSES = 2**31
"""Process ids are smaller."""
PROCESSES = Path("/proc")
"""Where Linux tells about processes."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the system answers where a disk, or what a user may have of it, is full."""
CLOCK_CHANGES = 300.0
"""Seconds by which the start of a process may change with the clock, where only the clock
tells it."""


@dataclass(frozen=True)
class Mark:
    """Who made a mark."""

    host: str
    machine: str
    """Where the process id means something; see `this_machine`."""
    process_id: int
    started: int | float
    """When the process started, which tells it from a later one with its id; see
    `start_of`."""
    name: str
    """Different for each mark."""

    def __str__(self) -> str:
        if not self.machine:
            return "an unknown process"
        return f"process {self.process_id} on {self.host}"


def unknown(name: str) -> Mark:
    """Return a mark that does not say whose it is."""
    return Mark("", "", 0, 0, name)


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine is running."""
    # Late, for it is needed only where processes wait for each other.
    import psutil

    return bool(psutil.pid_exists(pid))


def start_of(pid: int) -> int | float | None:
    """Return when a process of this machine started, None if that cannot be seen: in
    clock ticks since the machine did, or, without /proc, in seconds of the clock.
    """
    # psutil adds the time of the machine's start, which changes when the clock is set.
    with suppress(OSError):
        content = (PROCESSES / f"{pid}/stat").read_bytes()
        # Field 22. The second one, the program's name in parentheses, may have blanks.
        return int(content.rpartition(b")")[2].split()[22 - 3])
    if (PROCESSES / "self/stat").exists():
        return None
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def this_machine() -> str:
    """Return what tells this machine from others, also those of the same host name, and
    a container from another on the same machine: 8 hex digits.
    """
    parts = [socket.gethostname()]
    # A container has process ids of its own, and often the host name of others. Only
    # Linux has these files.
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii"))
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()


def write_mark(path: Path) -> Mark:
    """Make the mark of this process; raises FileExistsError if there is one, OSError.

    Of several that try at once one succeeds, also on NFS from version 3.
    """
    pid = os.getpid()
    mark = Mark(
        socket.gethostname(), this_machine(), pid, start_of(pid) or 0, uuid4().hex
    )
    # Without a buffer, whose content would be written again when the file is closed.
    file = path.open("xb", buffering=0)
    try:
        with file:
            return _write(file, mark)
    except BaseException:
        # A mark that nobody keeps alive would keep others out for a while.
        with suppress(OSError):
            path.unlink()
        raise


def _write(file: BinaryIO, mark: Mark) -> Mark:
    """Write a mark, or NUL bytes if the disk is full; return what was written."""
    content = json.dumps(asdict(mark)).encode()
    try:
        if file.write(content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())
        return mark
    except OSError as error:
        if error.errno not in FULL:
            raise
    # Bytes that are not written take no space. Their number tells it from other marks.
    size = 1 + secrets.randbelow(MOST_BYTES)
    file.truncate(0)
    file.truncate(size)
    os.fsync(file.fileno())
    return unknown(str(size))


def read_mark(path: Path) -> Mark | None:
    """Return a mark; None if there is none, or it has just been created.

    Raises ValueError for a file that is no mark, OSError.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if not content:
        return None
    if len(content) <= MOST_BYTES and not content.strip(b"\0"):
        return unknown(str(len(content)))
    try:
        mark = Mark(**json.loads(content))
    except TypeError as error:
        raise ValueError(f"{path} is no mark") from error
    is_process = (
        isinstance(mark.process_id, int) and 0 <= mark.process_id < MOST_PROCESSES
    )
    if not is_process or not isinstance(mark.started, int | float):
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
    if not process_exists(mark.process_id):
        return False
    started = start_of(mark.process_id)
    if started is None or type(started) is not type(mark.started):
        # A process that is hidden from this one, or a mark of an earlier version, which
        # had the time of the clock.
        return silence(path) < SILENT
    # Another process may have its id by now.
    if isinstance(started, int):
        return started == mark.started
    return abs(started - mark.started) < CLOCK_CHANGES


def silence(path: Path) -> float:
    """Return for how many seconds a file was not touched; without end if it is gone."""
    try:
        return time.time() - touched(path)
    except FileNotFoundError:
        return float("inf")


def touched(path: Path) -> float:
    """Return when a file or folder was touched; raises OSError."""
    # One that cannot be opened, as another user's may be, is asked without.
    with suppress(OSError):
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
