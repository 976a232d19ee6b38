"""Write files and folders so that they are either complete or absent, and lock folders.

A file is written under a temporary name, synced and renamed, then its folder is synced.
A temporary name is `.tmp-ID-NAME`, with the id of the thread, which of a main thread is
the process id. Only the holder of a folder's lock removes those that a dead run left behind.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dstrain.errors import StateError, SystemFault

TEMPORARY = re.compile(r"^\.tmp-\d+-")
LOCK = ".lock"
HOLDER = ".lock.pid"
"""The id of the process that holds the lock. It has a file of its own, since not every
platform lets others read a locked file; it is removed before the lock is released.
"""
ORPHANS = 10.0
"""Seconds for which the loader processes of a killed run may outlive it and keep its
lock."""
REPLACED = ".replaced-"
"""Beginning of the name of a folder that another one is about to replace."""
UNTOUCHED = "existing files were not modified"
SYNCS_FOLDERS = os.name != "nt"
"""Whether the platform can open a folder, which syncing one requires."""


def temporary(path: Path) -> Path:
    """Return the temporary name beside `path` under which this thread builds it."""
    return path.with_name(f".tmp-{threading.get_native_id()}-{path.name}")


def final(path: Path) -> Path:
    """Return the path that a file built under a temporary name will have."""
    return Path(*(TEMPORARY.sub("", part) for part in path.parts))


def temporaries(folder: Path) -> list[Path]:
    """Return the files and folders with temporary names in this folder, not below it."""
    return [path for path in folder.glob(".tmp-*") if TEMPORARY.match(path.name)]


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
            folder.rename(folder.with_name(REPLACED + folder.name))
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
    # A file of such a name is somebody's.
    for old in filter(Path.is_dir, folder.glob(f"{REPLACED}*")):
        new = folder / old.name.removeprefix(REPLACED)
        if not new.exists():
            old.rename(new)
            continue
        for path in old.iterdir():
            if not (new / path.name).exists():
                path.rename(new / path.name)
        remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists, so that no part of it remains under its own name."""
    if folder.exists():
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
    that holds it, SystemFault if the folder cannot be written.
    """
    file_lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _acquire(file_lock, folder)
        (folder / HOLDER).write_text(f"{os.getpid()}\n")
    except OSError as error:
        file_lock.release()
        raise _fault(folder / LOCK, 0, error) from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink()
        file_lock.release()


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
