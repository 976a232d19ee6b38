"""A file is read again only if it changed, and equal content has equal digests."""

import json
import os
import time
from pathlib import Path

import pytest
from dstrain import StateError, SystemFault
from dstrain.storage import Digests, hash_json, sha256
from dstrain.storage.hashing import FileMemory


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert (
        sha256(tmp_path / "a")
        == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_hashes_depend_on_kind_and_content_but_not_on_the_order_of_names() -> None:
    assert hash_json("a", {"x": 1, "y": 2}) == hash_json("a", {"y": 2, "x": 1})
    assert (
        len(
            {
                hash_json("a", [1]),
                hash_json("b", [1]),
                hash_json("a", ["1"]),
                hash_json("a", [[1]]),
            }
        )
        == 4
    )


def settle(monkeypatch: pytest.MonkeyPatch, seconds: int = 10) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + seconds * 10**9)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []

    def digest(path: Path) -> str:
        read.append(path)
        return sha256(path)

    monkeypatch.setattr("dstrain.storage.hashing.sha256", digest)
    return read


def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    read = counted(monkeypatch)
    path, memory = tmp_path / "a", tmp_path / "memory"
    path.write_bytes(b"old")
    digests = Digests(memory)
    assert digests.of(path) == digests.of(str(path)) == sha256(path)
    digests.save()
    assert Digests(memory).of(path) == sha256(path)
    assert read == [path]


@pytest.mark.parametrize("how", ["other bytes", "times kept", "replaced, times kept"])
def test_a_changed_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    settle(monkeypatch)
    path, memory = tmp_path / "a", tmp_path / "memory"
    path.write_bytes(b"old")
    before = path.stat()
    digests = Digests(memory)
    digests.of(path)
    digests.save()
    time.sleep(0.02)  # times of files are those of the last tick of the clock
    if how.startswith("replaced"):
        (tmp_path / "b").write_bytes(b"new")
        (tmp_path / "b").rename(path)
    else:
        path.write_bytes(b"new")
    if how.endswith("kept"):
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Digests(memory).of(path) == sha256(path)
    with pytest.raises(StateError, match="changed while it was in use"):
        digests.check_unchanged([path])


def test_the_digest_of_a_file_changed_just_now_is_not_remembered(
    tmp_path: Path,
) -> None:
    path, memory = tmp_path / "a", tmp_path / "memory"
    path.write_bytes(b"old")
    digests = Digests(memory)
    digests.of(path)
    digests.save()
    assert json.loads(memory.read_text()) == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_damaged_memory_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(content)
    (tmp_path / "a").write_bytes(b"x")
    assert Digests(memory).of(tmp_path / "a") == sha256(tmp_path / "a")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemFault, match="absent: cannot be read: No such file"):
        Digests(Path("absent")).of(tmp_path / "absent")


def test_a_component_is_its_bytes_and_a_folder_its_files_in_their_places(
    tmp_path: Path,
) -> None:
    for name, content in {
        "a/x": "1",
        "a/sub/y": "2",
        "b/x": "1",
        "b/sub/y": "2",
        "c/y": "1",
        "c/sub/x": "2",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)

    def digest(*names: str) -> str:
        return Digests(Path("absent")).of_all([tmp_path / name for name in names])

    assert digest("a") == digest("b")
    assert digest("a") != digest("c")
    assert digest("a/x") == digest("b/x")  # another file's name
    assert digest("a/x", "a/sub/y") == digest("b/sub/y", "c/y")
    assert digest("a/x") != digest("a/sub/y")
    (tmp_path / "a/.cache").mkdir()
    (tmp_path / "a/.cache/state").touch()
    assert digest("a") == digest("b")
    (tmp_path / "a/sub/y").write_text("3")
    assert digest("a") != digest("b")


def test_a_value_is_recalled_only_for_the_same_marks_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    now = time.time_ns() - 60 * 10**9
    marks = [1, now, now, 7]
    memory = FileMemory(tmp_path / "memory")
    memory.remember("key", marks, {"size": [2, 3]})
    memory.save()
    later = FileMemory(tmp_path / "memory")
    assert later.recall("key", marks) == {"size": [2, 3]}
    assert later.recall("key", [2, now, now, 7]) is None
    assert later.recall("other", marks) is None


def test_names_that_are_not_utf_8_have_hashes_of_their_own() -> None:
    names = [name.decode(errors="surrogateescape") for name in (b"\xff", b"\xfe")]
    assert len({hash_json("name", name) for name in names}) == 2
