"""One process holds a folder; on file systems without locks, too, and on many machines."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path

import pytest
from dstrain import StateError, SystemFault
from dstrain.storage import lock, locks, marks
from dstrain.storage.locks import HOLDER, LOCK, TAKING_OVER, FolderLock, holder
from dstrain.storage.marks import SILENT, read_mark

HOLD = """
import errno, fcntl, os, sys, time
from pathlib import Path

from dstrain.storage.locks import lock

def refuse(*given):
    raise OSError(int(sys.argv[2]), "no locks")

if int(sys.argv[2]):
    fcntl.flock = refuse
with lock(Path(sys.argv[1])):
    if sys.argv[3] == "with a child" and os.fork() == 0:
        time.sleep(1)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(
    params=[0, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS],
    ids=["locks", "no lock service", "not supported", "not implemented"],
)
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the file system answers to a request for a lock, 0 if it has locks."""
    number: int = request.param
    if number:
        refuse_locks(monkeypatch, number)
    return number


def refuse_locks(patch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    def refuse(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(fcntl, "flock", refuse)


@contextmanager
def held(
    folder: Path, fault: int, child: str = ""
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


def move_away(folder: Path, seconds: float = 0.0) -> None:
    """Make the mark of the holder that of a process on another machine, touched so many
    seconds ago.
    """
    path = folder / HOLDER
    mark = read_mark(path)
    assert mark is not None
    there = replace(mark, machine="0" * 8, host="node-7")
    path.write_text(json.dumps(asdict(there)))
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_second_holder_is_refused_by_name_and_may_follow_later(
    fault: int, tmp_path: Path
) -> None:
    folder = tmp_path / "made" / "here"
    with held(folder, fault) as other:
        who = f"in use by process {other.pid} on "
        with pytest.raises(StateError, match=who), lock(folder):
            pass
        found = holder(folder)
        assert found is not None
        assert found.process_id == other.pid
    assert holder(folder) is None
    for _ in range(2):
        with lock(folder):
            mark = read_mark(folder / HOLDER)
            assert mark is not None
            assert mark.process_id == os.getpid()
            with (
                pytest.raises(StateError, match=f"by process {os.getpid()} "),
                lock(folder),
            ):
                pass
    assert set(names(folder)) <= {LOCK}


def test_a_lock_is_free_again_after_its_holder_was_killed_with_children_left(
    fault: int, tmp_path: Path
) -> None:
    with held(tmp_path, fault, "with a child"):
        pass
    with lock(tmp_path):
        assert holder(tmp_path) is not None


def test_a_holder_on_another_machine_is_waited_for_until_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch)
    with held(tmp_path, errno.ENOLCK):
        move_away(tmp_path, SILENT - 60)
        with pytest.raises(StateError, match="on node-7") as caught, lock(tmp_path):
            pass
        assert "if that machine is down" in str(caught.value)
        move_away(tmp_path, SILENT + 1)
        with lock(tmp_path):
            found = read_mark(tmp_path / HOLDER)
            assert found is not None
            assert found.process_id == os.getpid()


def test_locks_that_hold_on_one_machine_only_do_not_let_another_machine_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.2)
    with lock(tmp_path):
        path = tmp_path / HOLDER
    path.write_text(json.dumps(asdict(marks.Mark("node-7", "0" * 8, 1, 1, "x"))))
    with subprocess.Popen(
        ["sh", "-c", f"while sleep .05; do touch {path}; done"]
    ) as beats:
        with pytest.raises(StateError, match="process 1 on node-7"), lock(tmp_path):
            pass
        beats.kill()
    # One that gives no sign of life is dead, where the file system says so, too.
    with lock(tmp_path):
        pass


def test_a_stopped_holder_of_this_machine_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch)
    with held(tmp_path, errno.ENOLCK) as other:
        other.send_signal(signal.SIGSTOP)
        os.utime(tmp_path / HOLDER, (0, 0))
        with pytest.raises(StateError, match=f"process {other.pid}"), lock(tmp_path):
            pass


def test_a_later_process_with_the_id_of_the_holder_is_not_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch)
    with held(tmp_path, errno.ENOLCK):
        path = tmp_path / HOLDER
        mark = read_mark(path)
        assert mark is not None
        path.write_text(json.dumps(asdict(replace(mark, started=1))))
        with lock(tmp_path):
            pass


def test_of_many_that_take_over_from_a_dead_process_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch)
    with held(tmp_path, errno.ENOLCK):
        pass
    assert HOLDER in names(tmp_path)
    taken = []
    with ThreadPoolExecutor(8) as pool:
        contenders = [FolderLock(tmp_path) for _ in range(8)]
        taken = list(pool.map(lambda one: one.acquire(0.5), contenders))
    assert sum(taken) == 1
    for one in contenders:
        one.release()
    assert not {HOLDER, TAKING_OVER} & set(names(tmp_path))


@pytest.mark.parametrize("left", [HOLDER, TAKING_OVER])
def test_who_was_killed_while_it_took_the_lock_keeps_nobody_out(
    left: str, fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "ORPHANS", 0.1)
    with held(tmp_path, fault):
        pass
    (tmp_path / left).write_text("")
    if fault:
        with pytest.raises(StateError, match="in use by"), lock(tmp_path):
            pass
        long_ago = time.time() - SILENT - 1
        os.utime(tmp_path / left, (long_ago, long_ago))
    with lock(tmp_path):
        pass
    assert set(names(tmp_path)) <= {LOCK}


def test_a_file_system_that_fails_otherwise_is_a_system_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch, errno.EIO)
    with (
        pytest.raises(SystemFault, match="cannot be written: Input/output"),
        lock(tmp_path),
    ):
        pass


def test_a_full_disk_does_not_stop_a_lock(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every mark is tried first with its content, then without.
    fails = cycle([True, False])

    def fsync(descriptor: int) -> None:
        if next(fails):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        with lock(tmp_path):
            assert str(holder(tmp_path)) == "an unknown process"
            with (
                pytest.raises(StateError, match="in use by an unknown process"),
                lock(tmp_path),
            ):
                pass
    assert set(names(tmp_path)) <= {LOCK}


def test_a_disk_too_full_for_a_lock_is_a_system_fault_that_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(locks, "write_mark", refuse)
    with pytest.raises(SystemFault, match="No space") as caught, lock(tmp_path):
        pass
    assert "it needs a few kB" in str(caught.value)


def test_a_holder_elsewhere_that_found_the_disk_full_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.2)
    path = tmp_path / HOLDER
    path.write_bytes(bytes(100))
    with subprocess.Popen(
        ["sh", "-c", f"while sleep .05; do touch {path}; done"]
    ) as beats:
        with pytest.raises(StateError, match="by an unknown process"), lock(tmp_path):
            pass
        beats.kill()
    with lock(tmp_path):
        pass


@pytest.mark.parametrize("name", [LOCK, HOLDER, TAKING_OVER])
def test_a_file_of_somebody_else_in_the_place_of_the_locks_is_kept(
    name: str, tmp_path: Path
) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("7")
    (folder / name).write_text("kept by another program, longer than an id")
    with (
        pytest.raises(StateError, match=f"contains {name}, which dstrain did not"),
        lock(folder),
    ):
        pass
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    with (
        pytest.raises(StateError, match=f"contains {name}, which is a symbolic link"),
        lock(folder),
    ):
        pass
    assert outside.read_text() == "7"
    assert names(folder) == [name]


def test_a_lock_of_another_program_is_no_hindrance(tmp_path: Path) -> None:
    for name in (".lock", ".lock.pid"):
        (tmp_path / name).write_text("mine")
    with lock(tmp_path):
        pass
    assert {(tmp_path / name).read_text() for name in (".lock", ".lock.pid")} == {
        "mine"
    }


def test_a_folder_in_which_no_lock_can_be_made_is_a_system_fault(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SystemFault, match="cannot be written"),
        lock(tmp_path / "file" / "below"),
    ):
        pass


def test_a_lock_file_is_not_read_which_windows_refuses_while_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(path: Path) -> marks.Mark | None:
        if path.name == LOCK:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read_mark(path)

    monkeypatch.setattr(locks, "read_mark", refusing)
    with lock(tmp_path):
        found = holder(tmp_path)
        assert found is not None
        assert found.process_id == os.getpid()
        with pytest.raises(StateError, match="is in use by process"), lock(tmp_path):
            pass
