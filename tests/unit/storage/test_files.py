"""Files are whole or absent, equal for equal content, and every fault is named."""

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from dstrain.errors import StateError, SystemFault
from dstrain.storage import files
from dstrain.storage.hashing import sha256
from dstrain.storage.safetensors import read_tensors, write_tensors


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
        files.probe(tmp_path / "file")
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


@pytest.mark.parametrize("limit", [0, 9, 100, 4000])
def test_a_size_limit_keeps_the_old_tensors(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {})
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(
            SystemFault, match=r"a\.safetensors: cannot write 8,000 bytes"
        ):
            write_tensors(path, {"a": torch.ones(2000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.safetensors"]


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


def test_tensors_round_trip_of_every_kind(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": base,
        "tied": base,
        "view": base[1],
        "transposed": base.T,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "also_empty": torch.zeros(0),
        "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "grad": torch.ones(2, requires_grad=True),
        "long": torch.tensor([2**60]),
    }
    write_tensors(tmp_path / "a.safetensors", tensors, {"note": "é"})
    have, metadata = read_tensors(tmp_path / "a.safetensors")
    assert metadata == {"note": "é"}
    assert have.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert have[name].dtype == tensor.dtype
        assert torch.equal(have[name], tensor)


@pytest.mark.parametrize("metadata", [{}, {"a": "b"}])
def test_a_file_without_tensors_can_be_read(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    write_tensors(tmp_path / "a.safetensors", {}, metadata)
    assert read_tensors(tmp_path / "a.safetensors") == ({}, metadata)


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    metadata = {name: name * 3 for name in "hgfedcbaé"}
    for number in range(4):
        path = tmp_path / f"{number}.safetensors"
        write_tensors(path, {"b": torch.ones(3), "a": torch.zeros(2)}, metadata)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    tensors, header = read_tensors(path)
    assert header == metadata
    assert torch.equal(tensors["b"], torch.ones(3))


def test_tensors_are_as_readable_to_others_as_any_file(tmp_path: Path) -> None:
    files.write_file(tmp_path / "a.bin", b"")
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)}, {})
    assert (tmp_path / "a.safetensors").stat().st_mode == (
        tmp_path / "a.bin"
    ).stat().st_mode


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"PK\x03\x04 no safetensors"])
def test_what_is_no_safetensors_file_is_a_state_error(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        StateError, match=r"a\.safetensors: cannot be read as safetensors"
    ):
        read_tensors(path)


def test_commit_folder_replaces_one_that_is_there(tmp_path: Path) -> None:
    for content in ("old", "new"):
        building = files.temporary(tmp_path / "s")
        building.mkdir()
        files.write_file(building / "a", content.encode())
        files.commit_folder(building, tmp_path / "s")
    assert names(tmp_path) == ["s"]
    assert (tmp_path / "s" / "a").read_text() == "new"


def test_a_folder_in_the_place_of_weights_is_told_with_its_newest(
    tmp_path: Path,
) -> None:
    with pytest.raises(StateError, match="is a folder"):
        read_tensors(tmp_path)
    for name, time in (("epoch-0", 5), ("epoch-2", 9), ("epoch-1", 7)):
        (tmp_path / f"{name}.safetensors").touch()
        os.utime(tmp_path / f"{name}.safetensors", (time, time))
    with pytest.raises(StateError, match="is a folder") as caught:
        read_tensors(tmp_path)
    assert caught.value.help_lines == (
        f"its newest weights file: {tmp_path / 'epoch-2.safetensors'}",
    )


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".tmp-12-dir" / "deep").mkdir(parents=True)
    (tmp_path / ".tmp-12-file").write_text("")
    (tmp_path / ".tmp-12-link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_text("")
    (tmp_path / ".temporary").write_text("")
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == [".temporary", "kept"]
    assert names(tmp_path / "kept") == ["a"]


def test_a_second_holder_is_refused_by_pid_and_may_follow_later(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    hold = (
        "import sys; from pathlib import Path; from dstrain.storage.files import lock\n"
        "with lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(folder)], stdin=-1, stdout=-1
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(StateError, match=f"in use by process {holder.pid}"),
            files.lock(folder),
        ):
            pass
        holder.kill()
    with files.lock(folder):
        assert (folder / files.HOLDER).read_text() == f"{os.getpid()}\n"
    with files.lock(folder):
        pass


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert (
        sha256(tmp_path / "a")
        == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_files_import_no_torch() -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, dstrain.storage.files; assert 'torch' not in sys.modules",
        ],
        check=True,
    )
