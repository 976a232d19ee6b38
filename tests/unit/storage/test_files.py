"""Files are whole or absent, equal for equal content, and every fault is named."""

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from dstrain import SystemFault, UsageError
from dstrain.storage import (
    read_limited,
    remove_leftovers,
    replacing,
    temporary,
    write_file,
)
from dstrain.storage.temporaries import set_aside
from dstrain.storage.whole_folders import finish_replacing, replacing_folder

from tests.support.machines import most_bytes, move_elsewhere

TEN_MINUTES = 600


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for content in (b"old", b"new"):
        write_file(path, content)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.bin"]


def test_two_threads_may_write_one_file_at_once(tmp_path: Path) -> None:
    path, both = tmp_path / "a.bin", threading.Barrier(2)

    def write() -> None:
        with replacing(path) as building:
            building.write_bytes(b"half")
            both.wait()
            building.write_bytes(b"whole")
            both.wait()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(write) for _ in range(2)]:
            done.result()
    assert path.read_bytes() == b"whole"
    assert names(tmp_path) == ["a.bin"]


def test_a_write_that_fails_keeps_the_old_file_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_file(path, b"old")
    with most_bytes(1000), pytest.raises(SystemFault, match="1,234") as caught:
        write_file(path, b"x" * 1234)
    assert caught.value.where == str(path)
    with pytest.raises(KeyboardInterrupt), replacing(path) as building:
        building.write_bytes(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_an_interrupted_replacement_is_finished_or_undone(tmp_path: Path) -> None:
    new = tmp_path / "s"
    old = set_aside(new)
    old.mkdir()
    (old / "a").write_text("old")
    finish_replacing(tmp_path)
    assert names(tmp_path) == ["s"]
    new.rename(old)
    (old / "mine").write_text("mine")
    new.mkdir()
    (new / "a").write_text("new")
    finish_replacing(tmp_path)
    assert names(tmp_path) == ["s"]
    assert names(new) == ["a", "mine"]
    assert (new / "a").read_text() == "new"
    foreign = (".replaced-x", ".replaced-01234567-s")
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("mine")
    finish_replacing(tmp_path)
    assert names(tmp_path) == sorted([*foreign, "s"])
    assert (tmp_path / foreign[1] / "a").read_text() == "mine"


def test_a_folder_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    for content in (b"old", b"new"):
        with replacing_folder(folder) as building:
            write_file(building / "a", content)
    assert names(tmp_path) == ["s"]
    with (
        most_bytes(1),
        pytest.raises(SystemFault),
        replacing_folder(folder) as building,
    ):
        (building / "a").write_bytes(b"other")
    with pytest.raises(KeyboardInterrupt), replacing_folder(folder):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["s"]
    assert (folder / "a").read_bytes() == b"new"
    # A file in the place of a folder stays.
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemFault), replacing_folder(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (temporary(tmp_path / "dir") / "deep").mkdir(parents=True)
    temporary(tmp_path / "file").touch()
    temporary(tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    below = temporary(tmp_path / "kept" / "a")
    below.touch()
    users = [
        *(".temporary", ".tmp-2", ".tmp-keep.txt", ".tmp-v2-notes"),
        *(".tmp-1234-notes", ".tmp-1234-01234567-notes", ".tmp-12-epoch-1.safetensors"),
        ".tmp-01234567-12-12-01234567-notes",
    ]
    for name in users:
        (tmp_path / name).touch()
    (tmp_path / ".tmp-notes").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([*users, ".tmp-notes", "kept"])
    assert names(tmp_path / "kept") == [below.name]


def begin(path: Path, sender: Connection) -> None:
    """Begin a file, and never finish it."""
    building = temporary(path)
    building.touch()
    sender.send(building.name)
    threading.Event().wait()


def test_a_living_process_of_an_earlier_run_keeps_its_temporaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        move_elsewhere(elsewhere)
        remote, silent = (temporary(tmp_path / name) for name in ("remote", "silent"))
    temporary(tmp_path / "own").touch()
    remote.touch()
    silent.touch()
    long_ago = time.time() - TEN_MINUTES - 1
    os.utime(silent, (long_ago, long_ago))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    other = context.Process(target=begin, args=(tmp_path / "local", sender))
    other.start()
    begun = receiver.recv()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([remote.name, begun])
    other.kill()
    other.join()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [remote.name]


def test_no_two_machines_processes_or_threads_share_a_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    with ThreadPoolExecutor(1) as pool:
        found = [temporary(path), pool.submit(temporary, path).result()]
    with multiprocessing.get_context("fork").Pool(1) as processes:
        found.append(processes.apply(temporary, (path,)))
    move_elsewhere(monkeypatch)
    found.append(temporary(path))
    assert len(set(found)) == 4


def test_only_regular_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abcd")
    assert read_limited(path, 4) == b"abcd"
    os.mkfifo(tmp_path / "pipe")
    for other, limit in (
        (path, 3),
        # A file of the system without a size has a limit, too.
        (Path("/proc/self/status"), 10),
        *((one, 10) for one in (tmp_path, tmp_path / "pipe", Path("/dev/zero"))),
    ):
        with pytest.raises(UsageError) as caught:
            read_limited(other, limit)
        assert caught.value.where == str(other)
    with pytest.raises(FileNotFoundError):
        read_limited(tmp_path / "gone")
