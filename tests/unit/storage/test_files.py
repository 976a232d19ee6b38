"""Files are whole or absent, equal for equal content, and every fault is named."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dstrain import SystemFault, UsageError
from dstrain.storage import files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_file_replaces_whole_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    files.write_file(path, b"old")
    files.write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.bin"]


def test_a_folder_that_cannot_be_written_is_named_without_temporary_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemFault) as caught:
        files.check_writable(tmp_path / "file")
    assert caught.value.where == str(tmp_path / "file")
    assert ".tmp-" not in str(caught.value)


def test_the_order_is_write_sync_rename_sync_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1],
    )
    monkeypatch.setattr(
        Path,
        "replace",
        lambda self, to: (events.append("rename"), replace(self, to))[1],
    )
    files.write_file(tmp_path / "a.bin", b"x")
    assert events == [str(files.temporary(tmp_path / "a.bin")), "rename", str(tmp_path)]


def test_two_threads_may_write_one_file_at_once(tmp_path: Path) -> None:
    path, both = tmp_path / "a.bin", threading.Barrier(2, timeout=10)

    def write() -> None:
        with files.replacing(path) as building:
            building.write_bytes(b"half")
            both.wait()
            building.write_bytes(b"whole")
            both.wait()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(write) for _ in range(2)]:
            done.result()
    assert path.read_bytes() == b"whole"
    assert names(tmp_path) == ["a.bin"]


def test_a_full_disk_keeps_the_old_file_and_names_path_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    files.write_file(path, b"old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        SystemFault, match=r"a\.bin: cannot write 1,234 bytes: No space left on device"
    ):
        files.write_file(path, b"x" * 1234)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_folder_that_is_not_there_is_a_system_fault(tmp_path: Path) -> None:
    with pytest.raises(SystemFault, match="none"):
        files.write_json(tmp_path / "none" / "a.json", {})


def test_an_interrupt_while_writing_is_passed_on_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_file(tmp_path / "a.bin", b"x")
    assert names(tmp_path) == []


def test_equal_json_gives_equal_bytes(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"b": [1, 2.5], "a": "é"})
    files.write_json(tmp_path / "b.json", {"a": "é", "b": [1, 2.5]})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": "é", "b": [1, 2.5]}


def test_an_interrupted_replacement_is_finished_or_undone(tmp_path: Path) -> None:
    new = tmp_path / "s"
    old = files.set_aside(new)
    old.mkdir()
    (old / "a").write_text("old")
    files.finish_replacing(tmp_path)
    assert names(tmp_path) == ["s"]
    new.rename(old)
    (old / "mine").write_text("mine")
    new.mkdir()
    (new / "a").write_text("new")
    files.finish_replacing(tmp_path)
    assert names(tmp_path) == ["s"]
    assert names(new) == ["a", "mine"]
    assert (new / "a").read_text() == "new"
    for name in (".replaced-x", ".replaced-01234567-s"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("mine")
    files.finish_replacing(tmp_path)
    assert names(tmp_path) == [".replaced-01234567-s", ".replaced-x", "s"]
    assert (tmp_path / ".replaced-01234567-s/a").read_text() == "mine"


def test_a_file_in_the_place_of_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(SystemFault), files.replacing_folder(tmp_path / "s"):
        pass
    assert (tmp_path / "s").read_text() == "mine"
    assert names(tmp_path) == ["s"]


def test_a_folder_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with files.replacing_folder(tmp_path / "s") as building:
            files.write_file(building / "a", content.encode())
    assert names(tmp_path) == ["s"]
    with pytest.raises(SystemFault), files.replacing_folder(tmp_path / "s"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == ["s"]
    assert (tmp_path / "s" / "a").read_text() == "new"


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (files.temporary(tmp_path / "dir") / "deep").mkdir(parents=True)
    files.temporary(tmp_path / "file").write_text("")
    files.temporary(tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_text("")
    users = [
        *(".temporary", ".tmp-2", ".tmp-keep.txt", ".tmp-v2-notes"),
        *(".tmp-1234-notes", ".tmp-1234-01234567-notes", ".tmp-12-epoch-1.safetensors"),
        ".tmp-01234567-12-12-01234567-notes",
    ]
    for name in users:
        (tmp_path / name).write_text("")
    (tmp_path / ".tmp-notes").mkdir()
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([*users, ".tmp-notes", "kept"])
    assert names(tmp_path / "kept") == ["a"]


def test_a_living_process_of_an_earlier_run_keeps_its_temporaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(files, "this_machine", lambda: "0" * 8)
        remote, silent = map(
            files.temporary, (tmp_path / "remote", tmp_path / "silent")
        )
    with monkeypatch.context() as elsewhere, subprocess.Popen(["sleep", "60"]) as other:
        elsewhere.setattr(os, "getpid", lambda: other.pid)
        local = files.temporary(tmp_path / "local")
        elsewhere.undo()
        for path in (local, remote, silent, files.temporary(tmp_path / "own")):
            path.write_text("")
        long_ago = time.time() - files.SILENT - 1
        os.utime(silent, (long_ago, long_ago))
        files.remove_leftovers(tmp_path)
        assert names(tmp_path) == sorted([local.name, remote.name])
        other.kill()
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == [remote.name]


def test_no_two_machines_processes_or_threads_share_a_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    with ThreadPoolExecutor(1) as pool:
        found = [files.temporary(path), pool.submit(files.temporary, path).result()]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    found.append(files.temporary(path))
    monkeypatch.setattr(files, "this_machine", lambda: "0" * 8)
    found.append(files.temporary(path))
    assert len(set(found)) == 4
    assert {files.final(one) for one in found} == {path}


def test_files_import_no_torch() -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, dstrain.storage.files; assert 'torch' not in sys.modules",
        ],
        check=True,
    )


def test_removing_a_folder_that_is_a_link_leaves_what_it_leads_to(
    tmp_path: Path,
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    files.remove_folder(tmp_path / "link")
    assert names(tmp_path) == ["link", "outside"]


def test_folders_are_not_synced_where_they_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SYNCS_FOLDERS", False)
    synced: list[str] = []

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", note)
    files.write_file(tmp_path / "a.bin", b"x")
    assert synced == [str(files.temporary(tmp_path / "a.bin"))]


def test_only_regular_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abcd")
    assert files.read_limited(path, 4) == b"abcd"
    with pytest.raises(UsageError, match="has more than the 3 bytes that are read"):
        files.read_limited(path, 3)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match="is not a regular file"):
            files.read_limited(other)
    # A file of the system without a size has a limit, too.
    with pytest.raises(UsageError, match="has more than the 10 bytes"):
        files.read_limited(Path("/proc/self/status"), 10)
    with pytest.raises(FileNotFoundError):
        files.read_limited(tmp_path / "gone")
