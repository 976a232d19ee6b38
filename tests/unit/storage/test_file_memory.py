"""What was computed from files is remembered in few bytes, until they change."""

import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from dstrain import SystemFault
from dstrain.storage import ManyFiles, file_mark, file_memory, sha256
from dstrain.storage.file_memory import ENTRY, FileDigests

OLD = time.time_ns() - 60 * 10**9
MARKS = [1, OLD, OLD, 7]


def value(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_value_is_recalled_only_for_the_same_marks_of_its_files(
    tmp_path: Path,
) -> None:
    memory = ManyFiles(tmp_path / "memory")
    memory.remember("one", MARKS, value(1))
    memory.remember("two", MARKS * 2)
    for known in (memory, _saved(memory)):
        assert known.recall("one", MARKS) == value(1)
        assert known.recall("one", [2, *MARKS[1:]]) is None
        assert known.recall("two", MARKS * 2) == bytes(32)
        assert known.recall("two", [*MARKS, 2, *MARKS[1:]]) is None
        assert known.recall("other", MARKS) is None


def _saved(memory: ManyFiles) -> ManyFiles:
    memory.save()
    return ManyFiles(memory.path)


def test_new_values_take_the_place_of_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "MOST_RECENT", 3)
    memory = ManyFiles(tmp_path / "memory")
    for turn in range(3):
        for number in range(20):
            memory.remember(f"{number}", MARKS, value(number + turn))
        memory = _saved(memory)
        for number in range(20):
            assert memory.recall(f"{number}", MARKS) == value(number + turn)
    assert len(memory) == 20


def test_keys_are_told_apart_by_all_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "_hash", lambda key: b"12345678" + key.encode())
    memory = ManyFiles(tmp_path / "memory")
    for number in range(5):
        memory.remember(f"key----{number}", MARKS, value(number))
    later = _saved(memory)
    for number in range(5):
        assert later.recall(f"key----{number}", MARKS) == value(number)
    assert later.recall("key----9", MARKS) is None


@pytest.mark.parametrize("changed", [1, 2])
def test_what_changed_just_now_is_not_stored(tmp_path: Path, changed: int) -> None:
    memory = ManyFiles(tmp_path / "memory")
    marks = [*MARKS, *MARKS]
    marks[4 + changed] = time.time_ns()
    memory.remember("old", MARKS)
    assert not memory.unsettled
    memory.remember("key", marks)
    memory.save()
    assert memory.unsettled
    assert memory.recall("key", marks) is not None
    assert ManyFiles(memory.path).recall("key", marks) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\x93NUMPY\x01\0", b"\xff\xfe"])
def test_a_file_of_another_form_is_an_empty_memory_and_stays(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "memory"
    path.write_bytes(content)
    memory = ManyFiles(path)
    memory.remember("key", MARKS)
    memory.save()
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "array", [np.arange(3), np.zeros(3, ENTRY), np.zeros(0, ENTRY)]
)
def test_so_does_an_array_of_another_program(
    tmp_path: Path, array: np.ndarray[tuple[int], np.dtype[np.void]]
) -> None:
    path = tmp_path / "memory.npy"
    np.save(path, array)
    before = path.read_bytes()
    ManyFiles(path).save()
    assert path.read_bytes() == before


def test_a_damaged_memory_is_an_empty_one(tmp_path: Path) -> None:
    memory = ManyFiles(tmp_path / "memory")
    memory.remember("key", MARKS, value(1))
    memory.save()
    data = bytearray(memory.path.read_bytes())
    data[-2] ^= 1
    memory.path.write_bytes(data)
    assert ManyFiles(memory.path).recall("key", MARKS) is None


def test_a_value_takes_few_bytes_of_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "MOST_RECENT", 100)
    kept = {}
    for count in (2_000, 6_000):
        tracemalloc.start()
        memory = ManyFiles(tmp_path / str(count))
        for number in range(count):
            memory.remember(f"/data/{number}.png", MARKS, value(number))
        memory.save()
        kept[count] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert kept[6_000] - kept[2_000] < 100 * 4_000


def test_a_file_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    os.utime(path, ns=(OLD, OLD))
    digests = FileDigests(tmp_path / "memory")
    assert digests.of(str(path)) == sha256(path)
    assert digests.record(str(path)) == [*file_mark(path), sha256(path)]
    path.write_bytes(b"two")
    assert digests.of(str(path)) == sha256(path)
    with pytest.raises(SystemFault, match="b: cannot be read: No such file"):
        digests.of(str(tmp_path / "b"))
    with pytest.raises(KeyError):
        digests.record(str(tmp_path / "b"))


def test_each_key_has_a_number_of_its_own(tmp_path: Path) -> None:
    memory = ManyFiles(tmp_path / "memory.npy")
    keys = [f"key-{number}" for number in range(7)]
    for key in keys:
        memory.remember(key, MARKS)
    assert sorted(map(memory.number, keys)) == list(range(len(memory)))
    with pytest.raises(KeyError):
        memory.number("another")
