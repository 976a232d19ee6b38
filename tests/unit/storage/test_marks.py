"""A mark tells who uses a folder, and whether that process lives."""

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from dstrain.storage import marks
from dstrain.storage.marks import (
    SILENT,
    is_alive,
    kept_alive,
    process_exists,
    read_mark,
    remove_mark,
    silence,
    start_of,
    this_machine,
    write_mark,
)

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="has no /proc")


def fail_to_write(patch: pytest.MonkeyPatch, number: int, times: int = 1) -> None:
    """Let the next writes fail when their bytes reach the disk."""
    faults = [OSError(number, os.strerror(number))] * times

    def fsync(descriptor: int) -> None:
        if faults:
            raise faults.pop()

    patch.setattr(os, "fsync", fsync)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_process_exists_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert process_exists(os.getpid())
    assert not process_exists(process.pid)


def test_a_mark_names_its_process_and_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "mark"
    mark = write_mark(path)
    assert read_mark(path) == mark
    assert str(mark).startswith(f"process {os.getpid()} on ")
    assert is_alive(path, mark)
    with pytest.raises(FileExistsError):
        write_mark(path)
    remove_mark(path, replace(mark, name="of another"))
    assert path.exists()
    remove_mark(path, mark)
    assert read_mark(path) is None


@pytest.mark.parametrize(
    "content",
    [
        *("7", "[]", "{}", '{"host": 1}', "text", "x" * 2000, "\0" * 2000),
        json.dumps(asdict(marks.Mark("host", "0" * 8, 10**30, 1, "name"))),
    ],
)
def test_a_file_of_others_is_no_mark(content: str, tmp_path: Path) -> None:
    (tmp_path / "mark").write_text(content)
    with pytest.raises(ValueError):
        read_mark(tmp_path / "mark")


def test_a_process_elsewhere_is_alive_as_long_as_it_touches_its_mark(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mark"
    there = replace(write_mark(path), machine="0" * 8)
    assert there.machine != this_machine()
    for seconds, lives in ((0, True), (SILENT - 60, True), (SILENT + 1, False)):
        age(path, seconds)
        assert is_alive(path, there) is lives


@on_linux
def test_a_clock_that_is_set_does_not_end_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mark"
    mark = write_mark(path)
    started = psutil.Process().create_time()
    # psutil adds the time of the machine's start, which moves with the clock.
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: started + 3600)
    age(path, SILENT + 1)
    assert is_alive(path, mark)
    assert not is_alive(path, replace(mark, started=mark.started + 1))


def test_without_proc_the_clock_may_change_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "PROCESSES", tmp_path / "nothing")
    path = tmp_path / "mark"
    mark = write_mark(path)
    assert isinstance(mark.started, float)
    assert read_mark(path) == mark
    age(path, SILENT + 1)
    for seconds, lives in ((0, True), (60, True), (-60, True), (3600, False)):
        changed = replace(mark, started=mark.started + seconds)
        assert is_alive(path, changed) is lives


@on_linux
@pytest.mark.parametrize("what", ["an earlier version", "a hidden process"])
def test_a_process_whose_start_cannot_be_compared_counts_by_the_time_of_its_mark(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mark"
    mark = write_mark(path)
    if what == "an earlier version":
        mark = replace(mark, started=time.time())
    else:
        (tmp_path / "self").mkdir()
        (tmp_path / "self/stat").touch()
        monkeypatch.setattr(marks, "PROCESSES", tmp_path)
        assert start_of(os.getpid()) is None
    assert is_alive(path, mark)
    age(path, SILENT + 1)
    assert not is_alive(path, mark)


def test_a_mark_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_write(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        write_mark(tmp_path / "mark")
    # Not even a mark without content.
    fail_to_write(monkeypatch, errno.ENOSPC, times=2)
    with pytest.raises(OSError, match="No space"):
        write_mark(tmp_path / "mark")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_a_mark_is_without_content_and_counts_by_its_time(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "BEAT", 0.01)
    path, other = tmp_path / "mark", tmp_path / "other"
    fail_to_write(monkeypatch, number)
    mark = write_mark(path)
    assert not path.read_bytes().strip(b"\0")
    assert read_mark(path) == mark
    assert str(mark) == "an unknown process"
    other.write_bytes(bytes(path.stat().st_size + 1))
    assert read_mark(other) != mark
    age(path, SILENT - 60)
    assert is_alive(path, mark)
    age(path, SILENT + 1)
    assert not is_alive(path, mark)
    with kept_alive(path, mark):
        end = time.monotonic() + 10
        while not is_alive(path, mark) and time.monotonic() < end:
            time.sleep(0.01)
        assert is_alive(path, mark)
    assert not path.exists()


def test_a_mark_is_touched_as_long_as_it_is_kept_and_then_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "BEAT", 0.01)
    path = tmp_path / "mark"
    with kept_alive(path, write_mark(path)):
        os.utime(path, (0, 0))
        end = time.monotonic() + 10
        while silence(path) > 60 and time.monotonic() < end:
            time.sleep(0.01)
        assert silence(path) < 60
    assert not path.exists()


def test_a_mark_that_another_process_has_taken_over_is_left_to_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mark"
    with kept_alive(path, write_mark(path)):
        path.unlink()
        other = write_mark(path)
    assert read_mark(path) == other


def test_machines_of_one_name_differ_by_their_boot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = this_machine()
    assert here == this_machine()
    monkeypatch.setattr(Path, "read_text", lambda path, *encoding: "another boot")
    assert this_machine() != here
