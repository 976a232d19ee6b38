"""Values are removed from a cache only while nobody reads or writes it."""

import errno
import os
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, SystemFault
from dstrain.cache import READING, FeatureCache, exclusive, readers, remove_dead_marks
from dstrain.cache.in_use import REMOVING, reading, writer
from dstrain.storage import lock
from dstrain.storage.marks import SILENT

READ = """
import sys
from pathlib import Path

from dstrain.cache.in_use import reading

with reading(Path(sys.argv[1])):
    print("reads", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    FeatureCache.create(tmp_path / "cache")
    return tmp_path / "cache"


def left(folder: Path) -> list[Path]:
    return [*folder.glob(f"{READING}*"), *folder.glob(REMOVING)]


def age(path: Path) -> None:
    """Make a mark one that was not touched for too long."""
    long_ago = time.time() - SILENT - 1
    os.utime(path, (long_ago, long_ago))


def test_a_reader_is_named_until_it_ends_however_it_dies(cache: Path) -> None:
    line = [sys.executable, "-c", READ, str(cache)]
    with subprocess.Popen(line, stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert [mark.process_id for mark in readers(cache)] == [other.pid]
        what = f"is being read by process {other.pid} on "
        with pytest.raises(StateError, match=what), exclusive(cache):
            pass
        # Stage 1 only adds: it need not wait for readers.
        with lock(cache):
            remove_dead_marks(cache)
        other.kill()
    assert readers(cache) == []
    assert len(left(cache)) == 1
    (cache / REMOVING).touch()  # of one that was killed as it began
    with exclusive(cache):
        pass
    assert left(cache) == []


def test_many_read_at_once_and_leave_nothing(cache: Path) -> None:
    before = sorted(cache.rglob("*"))
    with reading(cache), reading(cache):
        assert len(readers(cache)) == 2
    assert sorted(cache.rglob("*")) == before


def test_nobody_begins_to_read_while_values_are_removed(cache: Path) -> None:
    with (
        exclusive(cache),
        pytest.raises(StateError, match=f"removed from it by process {os.getpid()} "),
        reading(cache),
    ):
        pass
    with reading(cache):
        pass


def test_a_writer_is_named_and_keeps_others_from_removing(cache: Path) -> None:
    assert writer(cache) is None
    with lock(cache):
        found = writer(cache)
        assert found is not None
        assert found.process_id == os.getpid()
        with pytest.raises(StateError, match="is in use by process"), exclusive(cache):
            pass


def test_a_reader_on_another_machine_counts_until_it_is_silent(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reading(cache):
        monkeypatch.setattr("dstrain.storage.marks.this_machine", lambda: "0" * 8)
        assert len(readers(cache)) == 1
        (path,) = left(cache)
        age(path)
        assert readers(cache) == []


@pytest.mark.parametrize("why", ["just being made", "of another version", "refused"])
def test_a_mark_that_cannot_be_read_counts_until_it_is_silent(
    why: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache / f"{READING}node-7-0123abcd.json"
    path.write_text("" if why == "just being made" else '{"version": 2}')
    opened = Path.open

    def refuse(one: Path, *given: Any, **named: Any) -> Any:
        if one == path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(one, *given, **named)

    if why == "refused":  # to another user than its own
        monkeypatch.setattr(Path, "open", refuse)
    assert len(readers(cache)) == 1
    what = f"read by an unknown process\n  its mark is {path.name}"
    with pytest.raises(StateError, match=what), exclusive(cache):
        pass
    age(path)
    assert readers(cache) == []
    with exclusive(cache):
        pass
    assert path.exists() is (why != "just being made")


def test_on_a_full_disk_readers_are_seen_and_values_can_be_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every mark is tried first with its content, then without.
    fails = cycle([True, False])

    def fsync(descriptor: int) -> None:
        if next(fails):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with reading(cache):
        assert len(readers(cache)) == 1
        what = "is being read by an unknown process"
        with pytest.raises(StateError, match=what), exclusive(cache):
            pass
    assert left(cache) == []
    what = "removed from it by an unknown process"
    with exclusive(cache), pytest.raises(StateError, match=what), reading(cache):
        pass
    assert left(cache) == []


def test_who_cannot_say_that_it_reads_or_removes_says_what_that_needs(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dstrain.cache.in_use.write_mark", refuse)
    for use in (reading, exclusive):
        with pytest.raises(SystemFault, match="No space") as caught, use(cache):
            pass
        assert "it needs a few kB" in str(caught.value)


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSYS, errno.ENOTSUP]
)
def test_a_cache_that_cannot_be_written_can_be_read(
    number: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("dstrain.cache.in_use.write_mark", refuse)
    with reading(cache):
        assert readers(cache) == []


def test_files_of_others_with_such_names_stay_and_folders_of_others_get_none(
    cache: Path, tmp_path: Path
) -> None:
    for name in (f"{READING}list.json", f"{READING}notes"):
        (cache / name).write_text("mine")
        age(cache / name)
    (cache / f"{READING}link").symlink_to(tmp_path / "nothing")
    with exclusive(cache):
        assert readers(cache) == []
    assert len(left(cache)) == 3
    (cache / REMOVING).write_text("mine")
    with (
        pytest.raises(StateError, match="which dstrain did not write"),
        exclusive(cache),
    ):
        pass
    with reading(tmp_path):
        assert left(tmp_path) == []
