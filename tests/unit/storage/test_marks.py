"""A mark tells who uses a folder, and whether that process lives."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

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
    this_machine,
    write_mark,
)


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
    "content", ["7", "[]", "{}", '{"host": 1}', "text", "x" * 2000]
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
        then = time.time() - seconds
        os.utime(path, (then, then))
        assert is_alive(path, there) is lives


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
    monkeypatch.setattr(Path, "read_text", lambda path: "another boot")
    assert this_machine() != here
