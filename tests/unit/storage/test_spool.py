"""Values that are too many for RAM are on disk, and read as they were written."""

import errno
import os
import tempfile
import tracemalloc
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dstrain import SystemFault
from dstrain.storage import Chosen
from dstrain.storage.spool import MOST_IN_RAM, Spool

VALUES = [
    ["a.png", "a dog", ["x", "y"]],
    {"literal": 1.5, "count": 10**17, "none": None},
    "half of a pair, \udc80, as names of files have it",
    "zero \0 and 狗",
]


def _filled(values: int = 0) -> Spool:
    spool = Spool()
    for value in [*VALUES, *range(values)]:
        spool.append(value)
    return spool


@pytest.mark.parametrize("count", [0, MOST_IN_RAM // 2])
def test_values_are_read_as_they_were_written(count: int) -> None:
    spool = _filled(count)
    assert len(spool) == len(VALUES) + count
    assert list(spool)[: len(VALUES)] == spool[: len(VALUES)] == VALUES
    assert all(spool[number] == value for number, value in enumerate(VALUES))
    if count:
        assert spool[-1] == count - 1
        assert sum(spool[len(VALUES) :: 1000]) == sum(range(0, count, 1000))
    with pytest.raises(IndexError):
        spool[len(spool)]


def test_a_value_takes_eight_bytes_of_ram() -> None:
    tracemalloc.start()
    kept = {}
    for count in (20_000, 60_000):
        spool = Spool()
        for number in range(count):
            spool.append(f"{number:0100}")
        assert sum(len(value) for value in spool) == 100 * count
        kept[count] = tracemalloc.get_traced_memory()[0]
        del spool
    tracemalloc.stop()
    assert kept[60_000] - kept[20_000] < 12 * 40_000


def test_its_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = _filled(MOST_IN_RAM // 2)
    assert spool[5] == 1
    assert not list(tmp_path.iterdir())


def _send(spool: Spool, sender: Connection) -> None:
    sender.send([spool[1], spool[-1], sum(list(spool)[len(VALUES) :])])


@pytest.mark.parametrize("is_windows", [False, True])
def test_another_process_reads_it(
    is_windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = _filled(MOST_IN_RAM // 2)
    if is_windows:
        _lack_shared_files(monkeypatch)
    receiver, sender = get_context("fork").Pipe()
    process = get_context("spawn").Process(target=_send, args=(spool, sender))
    process.start()
    assert receiver.recv() == [
        VALUES[1],
        MOST_IN_RAM // 2 - 1,
        sum(range(MOST_IN_RAM // 2)),
    ]
    process.join()


def _lack_shared_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what Windows has not."""
    monkeypatch.delattr(os, "pread")
    monkeypatch.setattr("dstrain.storage.spool.reduction", SimpleNamespace())


def test_values_are_read_between_writes_where_reading_moves_the_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _lack_shared_files(monkeypatch)
    spool = _filled(MOST_IN_RAM // 2)
    assert spool[1] == VALUES[1]
    spool.append("later")
    assert (spool[0], spool[-2], spool[-1]) == (
        VALUES[0],
        MOST_IN_RAM // 2 - 1,
        "later",
    )
    assert sum(list(spool)[len(VALUES) : -1]) == sum(range(MOST_IN_RAM // 2))


def test_a_full_disk_is_a_fault_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SystemFault, match="No space left on device") as caught:
        _filled(MOST_IN_RAM)
    assert caught.value.help_lines == ("set TMPDIR to a folder with room",)


def test_some_of_a_sequence_are_a_sequence() -> None:
    chosen = Chosen(_filled(), np.array([3, 0]))
    assert list(chosen) == [VALUES[3], VALUES[0]]
    assert list(chosen[1:]) == [VALUES[0]]
