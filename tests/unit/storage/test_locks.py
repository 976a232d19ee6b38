"""One process holds a folder; a file system without locks is warned of."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, SystemFault
from dstrain.storage import lock

from tests.support.machines import refuse_locks
from tests.support.unreadable import make_unreadable

LOCK, HOLDER = ".dstrain.lock", ".dstrain.lock.pid"
HOLD = """
import fcntl, os, sys, time
from pathlib import Path

from dstrain.storage import lock

with lock(Path(sys.argv[1])):
    if sys.argv[2] == "with a child" and os.fork() == 0:
        file = os.open(os.path.join(sys.argv[1], ".dstrain.lock"), os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX)  # when its parent has died
        time.sleep(1)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextmanager
def held(folder: Path, child: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the folder; it is killed at the end."""
    line = [sys.executable, "-c", HOLD, str(folder), child]
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
    found: dict[str, Any] = json.loads((folder / HOLDER).read_text())
    return found


def test_a_second_holder_is_refused_by_name_and_may_follow(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    with held(folder) as other:
        assert f"process {other.pid} on " in refused(folder)
    for _ in range(2):
        with lock(folder):
            assert f"process {os.getpid()} on " in refused(folder)
        take(folder)


def test_a_folder_that_it_made_goes_with_it_if_empty(tmp_path: Path) -> None:
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


def test_a_lock_is_free_though_killed_holders_left_children(tmp_path: Path) -> None:
    with held(tmp_path, "with a child"):
        pass
    take(tmp_path)


def test_a_file_system_without_locks_is_warned_of_and_one_that_fails_is_a_system_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        caplog.clear()
        with monkeypatch.context() as patch:
            refuse_locks(patch, number)
            take(tmp_path)
        assert "has no locks" in caplog.text
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(SystemFault) as caught, lock(tmp_path):
        pass
    assert caught.value.where == str(tmp_path / LOCK)
    assert os.strerror(errno.EIO) in caught.value.what
    (tmp_path / "file").touch()
    for folder, place in (("file", ""), ("file/below", LOCK)):
        with pytest.raises(SystemFault) as caught, lock(tmp_path / folder):
            pass
        assert caught.value.where == str(tmp_path / folder / place)


def test_a_full_disk_does_not_stop_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with lock(tmp_path):
        assert "another process" in refused(tmp_path)
    assert names(tmp_path) <= {LOCK}


OF_OTHERS = ("7", "[]", "{}", '{"host": 1}', "text", "x" * 2000)


@pytest.mark.parametrize("name", [LOCK, HOLDER])
def test_a_file_of_others_in_its_place_is_kept(name: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("7")
    for content in OF_OTHERS:
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
