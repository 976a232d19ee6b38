"""One process holds a folder; a file system without locks is warned of."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, SystemFault
from dstrain.storage import lock, marks

from tests.support.machines import fill_disk, refuse_locks
from tests.support.unreadable import make_unreadable

LOCK, HOLDER = ".dstrain.lock", ".dstrain.lock.pid"
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems without locks answer."""
SILENT = 600.0
"""Seconds without a sign of life after which a process elsewhere counts as ended."""
HOLD = """
import fcntl, os, sys, time
from pathlib import Path

from dstrain.storage import lock

def refuse(*given):
    raise OSError(int(sys.argv[2]), "no locks")

if int(sys.argv[2]):
    fcntl.flock = refuse
with lock(Path(sys.argv[1])):
    if sys.argv[3] == "with a child" and os.fork() == 0:
        if not int(sys.argv[2]):
            file = os.open(os.path.join(sys.argv[1], ".dstrain.lock"), os.O_RDWR)
            fcntl.flock(file, fcntl.LOCK_EX)  # when its parent has died
        time.sleep(1)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(params=[0, *NO_LOCKS])
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the file system answers to a request for a lock, 0 if it has locks."""
    number: int = request.param
    if number:
        refuse_locks(monkeypatch, number)
    return number


@contextmanager
def held(
    folder: Path, fault: int = errno.ENOLCK, child: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the folder; it is killed at the end."""
    line = [sys.executable, "-c", HOLD, str(folder), str(fault), child]
    with subprocess.Popen(line, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def take(folder: Path) -> None:
    """Hold the folder for a moment, leaving nothing."""
    with lock(folder):
        assert mark_of(folder)["process_id"] == os.getpid()
    assert names(folder) <= {LOCK}


def refused(folder: Path) -> str:
    """Who holds a folder that cannot be had, as the error says it."""
    with pytest.raises(StateError) as caught, lock(folder):
        pass
    assert caught.value.where == str(folder)
    return str(caught.value)


def mark_of(folder: Path) -> dict[str, Any]:
    """What the holder's mark says."""
    found: dict[str, Any] = json.loads((folder / HOLDER).read_text())
    return found


def change_mark(folder: Path, silence: float = 0.0, **changes: Any) -> None:
    """Change what the holder's mark says, and when it was touched."""
    path = folder / HOLDER
    path.write_text(json.dumps(mark_of(folder) | changes))
    age(path, silence)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_second_holder_is_refused_by_name_and_may_follow_later(
    fault: int, tmp_path: Path
) -> None:
    folder = tmp_path / "made" / "here"
    with held(folder, fault) as other:
        assert f"process {other.pid} on " in refused(folder)
    for _ in range(2):
        with lock(folder):
            assert f"process {os.getpid()} on " in refused(folder)
        take(folder)


@pytest.mark.usefixtures("fault")
def test_a_folder_that_it_made_goes_with_it_unless_something_is_in_it(
    tmp_path: Path,
) -> None:
    made, there = tmp_path / "made/folder", tmp_path / "there"
    there.mkdir()
    for folder in (made, there):
        with pytest.raises(StateError), lock(folder):
            raise StateError(folder, "is refused")
    assert not made.parent.exists()
    assert there.exists()
    with lock(made):
        (made / "mine").touch()
    assert (made / "mine").exists()


def test_a_lock_is_free_again_after_its_holder_was_killed_with_children_left(
    fault: int, tmp_path: Path
) -> None:
    with held(tmp_path, fault, "with a child"):
        pass
    take(tmp_path)


def test_a_mark_is_touched_as_long_as_it_is_kept_and_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "BEAT", 0.01)
    path = tmp_path / HOLDER
    with lock(tmp_path):
        os.utime(path, (0, 0))
        while not path.stat().st_mtime:
            time.sleep(0.01)
        # One that another process has made in its place is left to it.
        change_mark(tmp_path, name="of another")
    assert names(tmp_path) == {LOCK, HOLDER}


def test_a_file_system_that_fails_otherwise_is_a_system_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.EIO, errno.ENOSPC):
        with monkeypatch.context() as patch:
            fill_disk(patch, number, takes_empty=False)
            with pytest.raises(SystemFault) as caught, lock(tmp_path):
                pass
        assert caught.value.where == str(tmp_path / LOCK)
        assert os.strerror(number) in caught.value.what
        # What helps is said, and no mark is left, not even one without content.
        assert ("kB" in str(caught.value)) is (number == errno.ENOSPC)
        assert names(tmp_path) <= {LOCK}
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(SystemFault), lock(tmp_path):
        pass
    (tmp_path / "file").touch()
    for folder, place in (("file", ""), ("file/below", LOCK)):
        with pytest.raises(SystemFault) as caught, lock(tmp_path / folder):
            pass
        assert caught.value.where == str(tmp_path / folder / place)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_does_not_stop_a_lock(
    number: int, fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, number)
    path = tmp_path / HOLDER
    for _ in range(2):
        with lock(tmp_path):
            # It takes no space, and counts by its time alone.
            assert not path.read_bytes().strip(b"\0")
            assert "process" in refused(tmp_path)
    assert names(tmp_path) <= {LOCK}


OF_OTHERS = ("7", "[]", "{}", '{"host": 1}', "text", "x" * 2000, "\0" * 2000)


@pytest.mark.parametrize("name", [LOCK, HOLDER])
def test_a_file_of_somebody_else_in_the_place_of_the_locks_is_kept(
    name: str, tmp_path: Path
) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("7")
    with lock(folder):
        mark = mark_of(folder)
    impossible = [mark | {"process_id": 10**30}, mark | {"started": "then"}]
    for content in (*OF_OTHERS, *map(json.dumps, impossible)):
        (folder / name).write_text(content)
        assert name in refused(folder)
        assert (folder / name).read_text() == content
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    assert name in refused(folder)
    assert outside.read_text() == "7"
    # Locks of other programs are no hindrance.
    (folder / name).unlink()
    for other in (".lock", ".lock.pid"):
        (folder / other).write_text("mine")
    with lock(folder):
        pass
    assert names(folder) - {LOCK} == {".lock", ".lock.pid"}


def test_a_lock_file_is_not_read_which_windows_refuses_while_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unreadable(monkeypatch, tmp_path / LOCK, errno.EACCES)
    with lock(tmp_path):
        assert f"process {os.getpid()} on " in refused(tmp_path)
