"""What was computed from files is remembered in few bytes, until they change."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
from dstrain import StateError, SystemFault
from dstrain.storage import Digests, ManyFiles, file_mark, sha256

from tests.support.clock import settle
from tests.support.unreadable import make_unreadable

OLD = time.time_ns() - 60 * 10**9
MARKS = [1, OLD, OLD, 7]


def value(number: int) -> bytes:
    return number.to_bytes(32, "big")


def saved(memory: ManyFiles) -> ManyFiles:
    memory.save()
    return ManyFiles(memory.path)


@pytest.fixture
def memory(tmp_path: Path) -> ManyFiles:
    return ManyFiles(tmp_path / "memory.npy")


def test_a_value_is_recalled_for_the_same_marks_alone(memory: ManyFiles) -> None:
    memory.remember("one", MARKS, value(1))
    memory.remember("two", MARKS * 2)
    assert len(memory) == 2
    for known in (memory, saved(memory)):
        assert known.recall("one", MARKS) == value(1)
        assert known.recall("one", [2, *MARKS[1:]]) is None
        assert known.recall("two", MARKS * 2) == bytes(32)
        assert known.recall("two", [*MARKS, 2, *MARKS[1:]]) is None
        assert known.recall("other", MARKS) is None


@pytest.mark.parametrize("changed", [1, 2])
def test_what_changed_just_now_is_not_stored(changed: int, memory: ManyFiles) -> None:
    marks = [*MARKS, *MARKS]
    marks[4 + changed] = time.time_ns()
    memory.remember("old", MARKS)
    assert not memory.unsettled
    memory.remember("key", marks)
    memory.remember("other", MARKS)
    later = saved(memory)
    assert memory.unsettled
    assert memory.recall("key", marks) is not None
    assert later.recall("key", marks) is None
    assert later.recall("old", MARKS) is not None


def test_a_file_that_is_damaged_or_of_another_form_is_an_empty_memory_and_stays(
    memory: ManyFiles,
) -> None:
    memory.remember("key", MARKS, value(1))
    memory.save()
    own = np.load(memory.path)
    damaged = bytearray(memory.path.read_bytes())
    damaged[-2] ^= 1
    contents = [damaged, b"", b"{", b"\x93NUMPY\x01\0", b"\xff\xfe"]
    for array in (np.arange(3), np.zeros_like(own), own[:0]):
        np.save(memory.path, array)
        contents.append(memory.path.read_bytes())
    for content in contents:
        memory.path.write_bytes(content)
        again = ManyFiles(memory.path)
        assert again.recall("key", MARKS) is None
        again.remember("key", MARKS)
        again.save()
        assert memory.path.read_bytes() == content


# Digests of files.


def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    digests = Digests(tmp_path / "memory")
    digest = digests.of(str(path))
    assert digest == sha256(path)
    assert digests.record(str(path)) == [*file_mark(path), digest]
    digests.save()
    with monkeypatch.context() as patch:
        make_unreadable(patch, path, errno.EIO)
        for known in (digests, Digests(tmp_path / "memory")):
            assert known.of(str(path)) == digest
    path.write_bytes(b"two")
    assert Digests(tmp_path / "memory").of(str(path)) == digests.of(str(path)) != digest
    with pytest.raises(SystemFault) as caught:
        digests.of(str(tmp_path / "b"))
    assert caught.value.where == str(tmp_path / "b")
    with pytest.raises(KeyError):
        digests.record(str(tmp_path / "b"))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_whose_time_was_set_back_is_read_again(
    is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    path = tmp_path / "a"
    path.write_bytes(b"old")
    # Times of files are those of the last tick of the clock.
    os.utime(path, ns=(OLD, OLD))
    digests = Digests(tmp_path / "memory")
    before = digests.of(path)
    digests.save()
    changed = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == changed:
        (tmp_path / "b").write_bytes(b"new")
        if is_replaced:
            (tmp_path / "b").rename(path)
        else:
            path.write_bytes(b"new")
        os.utime(path, ns=(OLD, OLD))
    assert Digests(tmp_path / "memory").of(str(path)) == sha256(path) != before
    with pytest.raises(StateError) as caught:
        digests.check_unchanged([path])
    assert caught.value.where == str(path)
