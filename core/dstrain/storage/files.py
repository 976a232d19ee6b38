"""Write files and folders so that they are either complete or absent.

A file is written under a temporary name, synced and renamed, then its folder is synced.
A temporary name is `.tmp-MACHINE-PROCESS-THREAD-CHECK-NAME`, so that no two writers of a
folder that machines share have the same; CHECK is a checksum of the rest. Nobody else
makes such names, so what has one may be removed; only the holder of a folder's lock
removes those of a dead run.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

from dstrain.errors import StateError, SystemFault, UsageError

OWN = re.compile(
    r"(?P<beginning>\.tmp-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-\d+-|\.replaced-)"
    r"[0-9a-f]{8}-(?P<name>.+)",
    re.DOTALL,
)
"""Names of temporaries, and of folders that others are about to replace: beginning,
checksum, and the final name.
"""
CONFIG_BYTES = 2**24
"""Bytes of the largest file of options, or configuration of a model."""
SILENT = 600.0
"""Seconds without a change after which another machine's temporary counts as left; more
than the clocks of two machines may differ by."""
UNTOUCHED = "existing files were not modified"
SYNCS_FOLDERS = os.name != "nt"
"""Whether the platform can open a folder, which syncing one requires."""

REPLACES_OPEN_FILES = os.name != "nt"
"""Whether the platform replaces and removes files that a process has open or mapped."""


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
    return Path(*(_final_name(part) or part for part in path.parts))


def temporaries(folder: Path) -> list[Path]:
    """Return the files and folders with temporary names in this folder, not below it."""
    return _own(folder, ".tmp-")


def _named(path: Path, beginning: str) -> Path:
    check = hashlib.blake2b((beginning + path.name).encode(), digest_size=4).hexdigest()
    return path.with_name(f"{beginning}{check}-{path.name}")


def _final_name(name: str) -> str:
    """Return the final name of what has one of this module's names, '' for any other."""
    found = OWN.fullmatch(name)
    if found and _named(Path(found["name"]), found["beginning"]).name == name:
        return found["name"]
    return ""


def _own(folder: Path, beginning: str) -> list[Path]:
    """Return what has a name of this module that begins so in a folder."""
    paths = folder.glob(f"{beginning}*")
    return [path for path in paths if _final_name(path.name)]


def write_file(path: Path, data: bytes) -> None:
    """Replace the file by `data`; readers see either the old or the new bytes.

    Raises SystemFault.
    """
    with replacing(path, len(data)) as building:
        building.write_bytes(data)


@contextmanager
def replacing(path: Path, size: int = 0) -> Iterator[Path]:
    """Yield a temporary path to write, and rename it to `path` if nothing fails.

    size: bytes, for the message, if known. Any OSError becomes SystemFault.
    """
    building = temporary(path)
    try:
        yield building
        _sync(building)
        building.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            building.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_fault(path, size, error) from error
        raise


def write_json(path: Path, data: Any) -> None:
    """Replace the file by `data` as JSON with sorted keys; raises SystemFault.

    Equal data gives equal bytes.
    """
    text = json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True)
    write_file(path, f"{text}\n".encode())


def check_writable(folder: Path) -> None:
    """Create the folder and check that files can be written there; raises SystemFault."""
    path = temporary(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"dstrain\n")
    except OSError as error:
        raise write_fault(folder, 0, error) from error
    finally:
        with suppress(OSError):
            path.unlink()


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write, and rename it to `folder` if nothing fails.

    The files in it must be synced. A folder of that name is set aside until the new one
    is in place; files that only the old one has are kept. Any OSError becomes
    SystemFault.
    """
    building = temporary(folder)
    try:
        finish_replacing(folder.parent)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        yield building
        _sync_folder(building)
        if folder.is_dir():
            folder.rename(set_aside(folder))
        building.rename(folder)
        _sync_folder(folder.parent)
        finish_replacing(folder.parent)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        with suppress(OSError):
            finish_replacing(folder.parent)
        if isinstance(error, OSError):
            raise write_fault(folder, 0, error) from error
        raise


def finish_replacing(folder: Path) -> None:
    """Finish what `replacing_folder` began in this folder before it was killed, or undo
    it where the new folder is not in place; the caller holds the lock.
    """
    for old in _own(folder, ".replaced-"):
        new = folder / _final_name(old.name)
        if not new.exists():
            old.rename(new)
            continue
        if old.is_symlink():
            old.unlink()  # what it leads to stays
            continue
        for path in old.iterdir():
            if not (new / path.name).exists():
                path.rename(new / path.name)
        remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists, so that no part of it remains under its own name.

    A link stays: it is not the folder that it leads to.
    """
    if folder.exists() and not folder.is_symlink():
        doomed = temporary(folder)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


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


def read_limited(path: Path, most_bytes: int = CONFIG_BYTES) -> bytes:
    """Return the bytes of a file that `open_limited` opens; raises as it does."""
    with open_limited(path, most_bytes) as file:
        return file.read()


@contextmanager
def open_limited(path: Path, most_bytes: int) -> Iterator[IO[bytes]]:
    """Open a file that a user names; raises OSError.

    Raises UsageError before reading what is not a regular file, such as a pipe, which
    would never end, and for a file of more than `most_bytes`.
    """
    stat = path.stat()
    if not S_ISREG(stat.st_mode):
        raise UsageError(path, "is not a regular file")
    too_large = UsageError(
        path, f"has more than the {most_bytes:,} bytes that are read"
    )
    if stat.st_size > most_bytes:
        raise too_large
    with path.open("rb") as file:
        if stat.st_size:
            yield file
            return
        # Some files of the system have no size and no end.
        content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise too_large
        yield BytesIO(content)


def refuse_link(path: Path) -> None:
    """Raise StateError for a symbolic link, which would lead a write to another place."""
    if path.is_symlink():
        what = f"contains {path.name}, which is a symbolic link and is not followed"
        raise StateError(path.parent, what, "move it away, or use another folder")


def _sync(path: Path, flags: int = os.O_RDWR) -> None:
    # Windows syncs a file only through a descriptor that may write.
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    if SYNCS_FOLDERS:
        _sync(path, os.O_RDONLY)


def write_fault(path: Path, size: int, error: OSError) -> SystemFault:
    """Return the error for a file of `size` bytes, 0 if unknown, that cannot be written."""
    what = f"cannot write {size:,} bytes" if size else "cannot be written"
    reason = error.strerror or error
    return SystemFault(final(path), f"{what}: {reason}", UNTOUCHED)
