"""Name temporary files and folders, and remove those of dead runs.

A temporary name is `.tmp-MACHINE-PROCESS-THREAD-CHECK-NAME`, so that no two writers of a
folder that machines share have the same; CHECK is a checksum of the rest. Nobody else
makes such names, so what has one may be removed; only the holder of a folder's lock
removes those of a dead run.
"""

import hashlib
import os
import re
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

OWN = re.compile(
    r"(?P<beginning>\.tmp-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-\d+-|\.replaced-)"
    r"[0-9a-f]{8}-(?P<name>.+)",
    re.DOTALL,
)
"""Names of temporaries, and of folders that others are about to replace: beginning,
checksum, and the final name.
"""
SILENT = 600.0
"""Seconds without a change after which another machine's temporary counts as left; more
than the clocks of two machines may differ by."""


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
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii"))
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()


def temporary(path: Path) -> Path:
    """Return the temporary name beside `path` under which this thread builds it."""
    ids = f"{this_machine()}-{os.getpid()}-{threading.get_native_id()}"
    return _named(path, f".tmp-{ids}-")


def set_aside(folder: Path) -> Path:
    """Return the name beside a folder that it has until another one is in its place."""
    return _named(folder, ".replaced-")


def nameable(path: Path) -> Path:
    """Return the path with a name at its end, which '.' and '..' have not."""
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def final(path: Path) -> Path:
    """Return the path that a file built under a temporary name will have."""
    return Path(*(final_name(part) or part for part in path.parts))


def temporaries(folder: Path) -> list[Path]:
    """Return the files and folders with temporary names in this folder, not below it."""
    return own_paths(folder, ".tmp-")


def _named(path: Path, beginning: str) -> Path:
    check = hashlib.blake2b((beginning + path.name).encode(), digest_size=4).hexdigest()
    return path.with_name(f"{beginning}{check}-{path.name}")


def final_name(name: str) -> str:
    """Return the final name of what has one of this module's names, '' for any other."""
    found = OWN.fullmatch(name)
    if found and _named(Path(found["name"]), found["beginning"]).name == name:
        return found["name"]
    return ""


def own_paths(folder: Path, beginning: str) -> list[Path]:
    """Return what has a name of this module that begins so in a folder."""
    paths = folder.glob(f"{beginning}*")
    return [path for path in paths if final_name(path.name)]


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of a dead run from this folder, but not below it.

    Call it while holding the lock and before anything is written. What a process of an
    earlier run may still be writing, here or on another machine, stays.
    """
    for path in temporaries(folder):
        if _may_be_written(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _may_be_written(temporary: Path) -> bool:
    """Return whether another living process may have made a temporary."""
    found = OWN.fullmatch(temporary.name)
    assert found is not None
    if found["machine"] != this_machine():
        with suppress(FileNotFoundError):
            return time.time() - temporary.lstat().st_mtime < SILENT
        return False
    process = int(found["process"])
    return process != os.getpid() and process_exists(process)
