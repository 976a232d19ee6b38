"""A machine that lacks something, or is another one."""

import errno
import fcntl
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


def refuse_locks(patch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    """Let file systems answer so where a lock is asked for."""

    def refuse(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(fcntl, "flock", refuse)


def move_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Let this process run on another machine."""
    patch.setattr(socket, "gethostname", lambda: "elsewhere")


@contextmanager
def _limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def most_bytes(limit: int) -> AbstractContextManager[None]:
    """Inside, the system takes no larger file."""
    return _limited(resource.RLIMIT_FSIZE, limit)


def more_memory(limit: int) -> AbstractContextManager[None]:
    """Inside, this process gets at most so many bytes more."""
    data = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert data is not None
    return _limited(resource.RLIMIT_DATA, int(data[1]) * 1024 + limit)
