"""Values are removed from a cache only while nobody reads or writes it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.cache.backend.index import create_cache
from dstrain.cache.in_use import READING, exclusive, readers, reading, remove_dead_marks
from dstrain.storage import lock
from dstrain.storage.locks import is_held
from filelock import FileLock

from tests.support.machines import refuse_locks

REMOVING = ".removing.json"
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
    create_cache(tmp_path / "cache")
    return tmp_path / "cache"


def left(folder: Path) -> list[Path]:
    return [*folder.glob(f"{READING}*"), *folder.glob(REMOVING)]


def remove(cache: Path) -> None:
    with exclusive(cache):
        pass


def refused(cache: Path) -> str:
    """Why nothing may be removed from a cache, or nobody may read it."""
    with pytest.raises(StateError) as caught:
        remove(cache)
    assert caught.value.where == str(cache)
    return str(caught.value)


def refuse_writing(patch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(FileLock, "acquire", refuse)


def test_a_reader_is_named_until_it_ends_however_it_dies(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [sys.executable, "-c", READ, str(cache)]
    with subprocess.Popen(line, stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert [who and who.process_id for who in readers(cache)] == [other.pid]
        assert f"process {other.pid} on " in refused(cache)
        # Stage 1 only adds: it need not wait for readers.
        with lock(cache):
            remove_dead_marks(cache)
        with monkeypatch.context() as patch:
            refuse_writing(patch, errno.EACCES)  # as to another user
            assert len(readers(cache)) == 1
        other.kill()
    assert readers(cache) == []
    with monkeypatch.context() as patch:
        refuse_writing(patch, errno.EACCES)
        assert readers(cache) == []
    assert len(left(cache)) == 1
    (cache / REMOVING).touch()  # of one that was killed as it began
    remove(cache)
    assert left(cache) == []


def test_nobody_reads_or_removes_beside_who_removes_or_writes(cache: Path) -> None:
    for hold in (exclusive, lock):
        with hold(cache):
            assert f"process {os.getpid()} on " in refused(cache)
    with exclusive(cache):
        with pytest.raises(StateError, match=f"process {os.getpid()} ") as caught:
            reading(cache).__enter__()
        assert REMOVING in str(caught.value)
    before = sorted(cache.rglob("*"))
    with reading(cache), reading(cache):
        assert len(readers(cache)) == 2
    assert sorted(cache.rglob("*")) == before


@pytest.mark.parametrize("content", ["", '{"version": 2}'])
def test_what_nobody_holds_keeps_nobody_out(content: str, cache: Path) -> None:
    """As a process leaves that was killed, and a file of another kind, which stays."""
    path = cache / f"{READING}zz-7-0123abcd.json"
    path.write_text(content)
    assert readers(cache) == []
    remove(cache)
    assert path.exists() is bool(content)


def test_a_mark_that_an_earlier_version_touches_counts(cache: Path) -> None:
    """It held none, and wrote more of its process."""
    path = cache / f"{READING}node-7-0123abcd.json"
    path.write_text('{"host": "node", "process_id": 7, "started": 1, "machine": "a"}')
    assert "process 7 on node" in refused(cache) and len(readers(cache)) == 1
    os.utime(path, (0, 0))
    remove(cache)
    assert left(cache) == readers(cache) == []


def test_a_dead_mark_is_held_as_it_goes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has just made one, and does not hold it yet, sees that it is gone."""
    path = cache / f"{READING}zz-7-0123abcd.json"
    path.touch()
    unlink, held = Path.unlink, []

    def watched(one: Path, missing_ok: bool = False) -> None:
        held.extend([is_held(one)] if one == path else [])
        unlink(one, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    remove(cache)
    assert held == [True] and not path.exists()


def test_where_no_lock_can_be_had_a_mark_counts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user, or in a file system without locks."""
    refuse_locks(monkeypatch)
    with reading(cache):
        assert len(readers(cache)) == 1
        assert f"its mark is {left(cache)[0].name}" in refused(cache)
    assert left(cache) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_cache_that_cannot_be_written_can_be_read(
    number: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writing(monkeypatch, number)
    with reading(cache):
        assert readers(cache) == []


def test_files_of_others_with_such_names_stay_and_folders_of_others_get_none(
    cache: Path, tmp_path: Path
) -> None:
    for name in (f"{READING}list.json", f"{READING}notes"):
        (cache / name).write_text("mine")
    (tmp_path / "mine").touch()
    (cache / f"{READING}node-7-0123abcd.json").symlink_to(tmp_path / "mine")
    with exclusive(cache):
        assert readers(cache) == []
    assert len(left(cache)) == 3
    (cache / REMOVING).write_text("mine")
    assert REMOVING in refused(cache)
    with reading(tmp_path):
        assert left(tmp_path) == []
