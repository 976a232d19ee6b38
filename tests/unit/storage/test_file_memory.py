"""What was computed from files is remembered in few bytes, until they change."""

import errno
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from dstrain import StateError, SystemFault
from dstrain.storage import Digests, FileMemory, file_mark, sha256

from tests.support.clock import settle
from tests.support.unreadable import make_unreadable

OLD = time.time_ns() - 60 * 10**9
MARKS = [1, OLD, OLD, 7]


def value(number: int) -> bytes:
    return number.to_bytes(32, "big")


def saved(memory: FileMemory) -> FileMemory:
    memory.save()
    return FileMemory()


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in the user's folder."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "user"))
    return tmp_path / "user/files.sqlite"


@pytest.fixture
def memory(stored: Path) -> FileMemory:
    return FileMemory()


def test_a_value_is_recalled_for_the_same_marks_alone(memory: FileMemory) -> None:
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
def test_what_changed_just_now_is_not_stored(changed: int, memory: FileMemory) -> None:
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


def test_kinds_have_keys_of_their_own(memory: FileMemory) -> None:
    memory.remember("key", MARKS, value(1))
    other = FileMemory("other")
    other.remember("key", MARKS, value(2))
    other.save()
    assert saved(memory).recall("key", MARKS) == value(1)
    assert FileMemory("other").recall("key", MARKS) == value(2)


def test_a_file_of_another_form_is_an_empty_memory_and_stays(
    stored: Path, memory: FileMemory
) -> None:
    stored.parent.mkdir()
    with closing(sqlite3.connect(stored)) as table, table:
        table.execute("CREATE TABLE files (key, mark, value, checksum)")
    for content in (b"{" * 999, b"SQLite format 3\0" * 99, stored.read_bytes()):
        stored.write_bytes(content)
        again = FileMemory()
        assert again.recall("key", MARKS) is None
        again.remember("key", MARKS)
        again.save()
        assert stored.read_bytes() == content


def test_a_damaged_value_is_not_used(stored: Path, memory: FileMemory) -> None:
    whole, damaged = b"a" * 32, b"b" + b"a" * 31
    memory.remember("one", MARKS, whole)
    memory.remember("two", MARKS, value(2))
    memory.save()
    content = stored.read_bytes()
    assert content.count(whole) == 1
    stored.write_bytes(content.replace(whole, damaged))
    again = FileMemory()
    assert again.recall("one", MARKS) is None
    assert again.recall("two", MARKS) == value(2)
    again.remember("one", MARKS, whole)
    assert saved(again).recall("one", MARKS) == whole


# Digests of files.


def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    digests = Digests()
    digest = digests.of(str(path))
    assert digest == sha256(path)
    assert digests.record(str(path)) == [*file_mark(path), digest]
    digests.save()
    with monkeypatch.context() as patch:
        make_unreadable(patch, path, errno.EIO)
        for known in (digests, Digests()):
            assert known.of(str(path)) == digest
    path.write_bytes(b"two")
    assert Digests().of(str(path)) == digests.of(str(path)) != digest
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
    digests = Digests()
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
    assert Digests().of(str(path)) == sha256(path) != before
    with pytest.raises(StateError) as caught:
        digests.check_unchanged([path])
    assert caught.value.where == str(path)
