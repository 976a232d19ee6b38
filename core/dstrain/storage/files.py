"""Files that are whole or absent: written under a temporary name, synced, renamed, then
their folder is synced.

Temporary names begin with `.tmp-` and carry the thread id, which of a main thread is
the process id. Only the holder of a folder's lock removes those that a dead run left
behind.
"""

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dstrain.errors import StateError, SystemFault

TEMPORARY = ".tmp-"
LOCK = ".lock"
ORPHANS = 10.0
"""Seconds for which loader processes may outlive a killed process; until they end they
hold its locks.
"""
UNTOUCHED = "existing files were not modified"


def temporary(path: Path) -> Path:
    """The temporary name beside `path` under which this thread builds it."""
    return path.with_name(f"{TEMPORARY}{threading.get_native_id()}-{path.name}")


def final(path: Path) -> Path:
    """The path that something built under a temporary one is to have, for messages."""
    return Path(
        *(re.sub(rf"^{re.escape(TEMPORARY)}\d+-", "", part) for part in path.parts)
    )


def write_file(path: Path, data: bytes) -> None:
    """Replace the file by `data`, so that a reader finds the old or the new bytes
    whole; raises SystemFault.
    """
    with replacing(path, len(data)) as building:
        building.write_bytes(data)


@contextmanager
def replacing(path: Path, size: int = 0) -> Iterator[Path]:
    """Give a temporary path to write; commit it to `path` afterwards, or remove it when
    anything went wrong.

    size: bytes, for the message, if known. An OSError becomes SystemFault, whatever
    raised it.
    """
    building = temporary(path)
    try:
        yield building
        _sync(building)
        building.replace(path)
        _sync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            building.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _fault(path, size, error) from error
        raise


def write_json(path: Path, data: Any) -> None:
    """Replace the file by `data` as JSON, keys sorted, so that equal data gives equal
    bytes; raises SystemFault.
    """
    write_file(
        path,
        (
            json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
        ).encode(),
    )


def probe(folder: Path) -> None:
    """Make the folder, write a file there and remove it: one that cannot be written is
    named early; or SystemFault.
    """
    path = temporary(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, b"dstrain\n")
        path.unlink()
    except (SystemFault, OSError) as error:
        reason = (
            error.what
            if isinstance(error, SystemFault)
            else f"cannot be written: {error.strerror}"
        )
        raise SystemFault(str(folder), reason, "nothing was begun") from error


def commit_folder(building: Path, final: Path) -> None:
    """Give a folder built under a temporary name its final one, in one step; its files
    are synced already.

    A folder of the final name is kept as `<name>.old` until the new one is in place.
    Raises SystemFault.
    """
    old = final.with_name(final.name + ".old")
    try:
        _sync(building)
        if final.exists():
            remove_folder(old)
            final.rename(old)
        building.rename(final)
        _sync(final.parent)
        remove_folder(old)
    except OSError as error:
        raise _fault(final, 0, error) from error


def remove_folder(folder: Path) -> None:
    """Remove a folder, if there, so that no half of it is ever seen under its own name."""
    if folder.exists():
        doomed = temporary(folder)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporaries of a dead run from this folder, not from those below it.

    Call it while holding the lock and before anything is written: then whoever wrote
    them is dead. Raises SystemFault.
    """
    for path in sorted(folder.glob(f"{TEMPORARY}*")):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise _fault(path, 0, error) from error


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder, made if absent, for this process alone; the lock ends with the
    process, however it dies.

    Raises StateError naming the process that holds it, SystemFault if the folder cannot
    be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _fault(folder / LOCK, 0, error) from error
    try:
        _take(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path) -> None:
    latest = time.monotonic() + ORPHANS
    while (holder := _holder(descriptor, folder)) is not None:
        if not _has_ended(holder) or time.monotonic() > latest:
            advice = "wait for it to end, or use another folder"
            raise StateError(
                str(folder), f"is in use by process {holder or 'unknown'}", advice
            )
        time.sleep(0.1)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise _fault(folder / LOCK, 0, error) from error


def _holder(descriptor: int, folder: Path) -> str | None:
    """Take the lock and return None, or the number of the process that holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    except OSError as error:
        raise _fault(folder / LOCK, 0, error) from error
    return None


def _has_ended(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (ValueError, PermissionError):
        pass
    return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fault(path: Path, size: int, error: OSError) -> SystemFault:
    what = f"cannot write {size:,} bytes" if size else "cannot be written"
    return SystemFault(
        str(final(path)), f"{what}: {error.strerror or error}", UNTOUCHED
    )
