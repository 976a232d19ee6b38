"""Write files and folders so that they are either complete or absent, and lock folders.

A file is written under a temporary name, synced and renamed, then its folder is synced.
A temporary name is `.tmp-ID-CHECK-NAME`: the id of the thread, which of a main thread is
the process id, and a checksum of the rest. Nobody else makes such names, so what has one
may be removed; only the holder of a folder's lock removes those of a dead run.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from stat import S_ISREG
from typing import Any

from filelock import FileLock, Timeout

from dstrain.errors import StateError, SystemFault, UsageError

OWN = re.compile(r"(\.tmp-\d+-|\.replaced-)([0-9a-f]{8})-(.+)", re.DOTALL)
"""Names of temporaries, and of folders that others are about to replace: beginning,
checksum, and the final name.
"""
LOCK = ".dstrain.lock"
HOLDER = ".dstrain.lock.pid"
"""The id of the process that holds the lock. It has a file of its own, since not every
platform lets others read a locked file; it is removed before the lock is released.
"""
LONGEST_ID = 20
"""Most bytes that the file of the holder has."""
CONFIG_BYTES = 2**24
"""Bytes of the largest file of options, or configuration of a model."""
ORPHANS = 10.0
"""Seconds for which the loader processes of a killed run may outlive it and keep its
lock."""
UNTOUCHED = "existing files were not modified"
SYNCS_FOLDERS = os.name != "nt"
"""Whether the platform can open a folder, which syncing one requires."""


def temporary(path: Path) -> Path:
    """Return the temporary name beside `path` under which this thread builds it."""
    return _named(path, f".tmp-{threading.get_native_id()}-")


def set_aside(folder: Path) -> Path:
    """Return the name beside a folder that it has until another one is in its place."""
    return _named(folder, ".replaced-")


def nameable(path: Path) -> Path:
    """Return the path with a name at its end, which '.' and '..' have not."""
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def unused_name(path: Path) -> Path:
    """Return this path, or one beside it with a number behind its name, where nothing is."""
    path = nameable(path)
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(one for one in chain([path], numbered) if not os.path.lexists(one))


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
    if found and _named(Path(found[3]), found[1]).name == name:
        return found[3]
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
            raise _fault(path, size, error) from error
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
        raise _fault(folder, 0, error) from error
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
            raise _fault(folder, 0, error) from error
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

    Call it while holding the lock and before anything is written: only then is the
    process that wrote them known to be dead.
    """
    for path in temporaries(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine is running."""
    # Late, for it is needed only where processes wait for each other.
    import psutil

    return bool(psutil.pid_exists(pid))


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process alone, creating it if needed.

    The lock ends with the process, however it dies. Raises StateError naming the process
    that holds it, or a file in the place of the lock's that is somebody else's;
    SystemFault if the folder cannot be written.
    """
    file_lock = folder_lock(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _acquire(file_lock, folder)
        (folder / HOLDER).write_text(f"{os.getpid()}\n")
    except FileExistsError as error:
        what = "is a file; expected a folder"
        raise SystemFault(folder, what, UNTOUCHED) from error
    except OSError as error:
        file_lock.release()
        raise _fault(folder / LOCK, 0, error) from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink()
        file_lock.release()


def read_limited(path: Path, most_bytes: int = CONFIG_BYTES) -> bytes:
    """Return the bytes of a file that a user names; raises OSError.

    Raises UsageError before reading what is not a regular file, such as a pipe, which
    would never end, and for a file of more than `most_bytes`.
    """
    stat = path.stat()
    if not S_ISREG(stat.st_mode):
        raise UsageError(path, "is not a regular file")
    with path.open("rb") as file:
        # Some files of the system have no size and no end.
        content = file.read(most_bytes + 1) if stat.st_size <= most_bytes else b""
    if max(len(content), stat.st_size) > most_bytes:
        raise UsageError(path, f"has more than the {most_bytes:,} bytes that are read")
    return content


def folder_lock(folder: Path) -> FileLock:
    """Return the lock of a folder, to be acquired.

    Raises StateError for a file in its place that is somebody else's.
    """
    _check_own(folder / LOCK, 0)
    _check_own(folder / HOLDER, LONGEST_ID)
    return FileLock(folder / LOCK)


def _check_own(path: Path, most_bytes: int) -> None:
    """Refuse a file of a lock that this module cannot have written: it would be replaced."""
    refuse_link(path)
    if path.exists() and (not path.is_file() or path.stat().st_size > most_bytes):
        what = f"contains {path.name}, which dstrain did not write"
        raise StateError(path.parent, what, "move it away, or use another folder")


def refuse_link(path: Path) -> None:
    """Raise StateError for a symbolic link, which would lead a write to another place."""
    if path.is_symlink():
        what = f"contains {path.name}, which is a symbolic link and is not followed"
        raise StateError(path.parent, what, "move it away, or use another folder")


def _acquire(file_lock: FileLock, folder: Path) -> None:
    holder = _holder(folder)
    # A holder that is dead left orphans, which will soon release the lock.
    is_orphaned = holder is not None and not process_exists(holder)
    try:
        file_lock.acquire(timeout=ORPHANS if is_orphaned else 0)
    except Timeout as error:
        raise StateError(
            folder,
            f"is in use by process {_holder(folder) or 'unknown'}",
            "wait for it to end, or use another folder",
        ) from error


def _holder(folder: Path) -> int | None:
    try:
        return int((folder / HOLDER).read_text())
    except (OSError, ValueError):
        return None


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


def _fault(
    path: Path,
    size: int,
    error: OSError,
) -> SystemFault:
    what = f"cannot write {size:,} bytes" if size else "cannot be written"
    reason = error.strerror or error
    return SystemFault(final(path), f"{what}: {reason}", UNTOUCHED)
