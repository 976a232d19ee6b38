"""Values that are too many for RAM are on disk, and read as they were written."""

import os
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dstrain import SystemFault
from dstrain.storage import Chosen
from dstrain.storage.spool import Spool

from tests.support.machines import most_bytes

VALUES = [
    ["a.png", "a dog", ["x", "y"]],
    {"literal": 1.5, "count": 10**17, "none": None},
    "half of a pair, \udc80, as names of files have it",
    "zero \0 and 狗",
]
MANY = [f"{number:05000}" for number in range(500)]
"""More than are kept in RAM."""


def filled(more: list[str] = MANY) -> Spool:
    spool = Spool()
    for value in [*VALUES, *more]:
        spool.append(value)
    return spool


def lack_shared_files(patch: pytest.MonkeyPatch) -> None:
    """Take away what Windows has not."""
    patch.delattr(os, "pread")
    patch.setattr("dstrain.storage.spool.reduction", SimpleNamespace())


@pytest.mark.parametrize("more", [[], MANY], ids=["few", "many"])
@pytest.mark.parametrize("is_windows", [False, True])
def test_values_are_read_as_they_were_written_between_writes(
    more: list[str], is_windows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if is_windows:
        lack_shared_files(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = filled(more)
    wanted = [*VALUES, *more]
    assert list(spool) == list(spool[:]) == wanted
    assert (spool[1], spool[-1]) == (wanted[1], wanted[-1])
    spool.append("later")
    assert (spool[0], spool[-2], spool[-1]) == (wanted[0], wanted[-1], "later")
    assert len(spool) == len(wanted) + 1
    with pytest.raises(IndexError):
        spool[len(spool)]
    # Its file has no name.
    assert not os.listdir(tmp_path)
    chosen = Chosen(spool, np.array([3, 0]))
    assert list(chosen) == [VALUES[3], VALUES[0]]
    assert list(chosen[1:]) == [VALUES[0]]


def send(spool: Spool, sender: Connection) -> None:
    sender.send([spool[1], spool[-1], list(spool)[4:] == MANY])


@pytest.mark.parametrize("is_windows", [False, True])
def test_processes_read_it(is_windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = filled()
    if is_windows:
        lack_shared_files(monkeypatch)
    receiver, sender = get_context("fork").Pipe()
    process = get_context("spawn").Process(target=send, args=(spool, sender))
    process.start()
    assert receiver.recv() == [VALUES[1], MANY[-1], True]
    process.join()


def test_a_full_disk_is_a_fault_of_the_system() -> None:
    with most_bytes(1000), pytest.raises(SystemFault, match="TMPDIR") as caught:
        filled()
    assert caught.value.where == tempfile.gettempdir()
