"""Samples come in their order, and errors keep their class, message and place."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from threading import Event
from typing import Any

import pytest
from dstrain import Sample, SampleKey, StateError, SystemFault, UsageError
from dstrain.data import Cell
from dstrain.training import DecodedSamples, MicroBatch, SampleSource, load_batches

from tests.support.caching_project import Place, filled_place, plain

LIMIT = 30.0
"""Seconds that no test waits."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with filled_place(tmp_path_factory.mktemp("filled")) as place:
        yield place


def micro_batches(*rows: tuple[int, ...]) -> list[MicroBatch]:
    keys = [[SampleKey(0, 0, 0, row) for row in part] for part in rows]
    return [MicroBatch(part, [1.0] * len(part), 1, True) for part in keys]


ORDER = micro_batches((3, 0), (1,), (2, 2), (0,), (1, 3), (0, 1, 2, 3))


def unsplit_rows(place: Place) -> DecodedSamples:
    dataset = place.setup("").dataset
    ids = dataset.sample_ids
    return DecodedSamples(dataset.rows, dataset.rows, ids, dataset.damage)


def loaded(source: SampleSource, workers: int) -> list[Any]:
    return [
        (
            batch.micro_batch,
            [(plain(sample.values), sample.inputs) for sample in batch.samples],
        )
        for batch in load_batches(source, ORDER, workers)
    ]


@pytest.mark.parametrize(
    ("kind", "method"), [("stored", "spawn"), ("stored", "fork"), ("rows", "fork")]
)
def test_samples_are_the_same_from_processes(
    filled: Place, kind: str, method: str
) -> None:
    source: SampleSource = filled.stored() if kind == "stored" else unsplit_rows(filled)
    here = loaded(source, 0)
    assert [micro for micro, _ in here] == ORDER
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        assert loaded(source, 1 if method == "spawn" else 2) == here
    finally:
        multiprocessing.set_start_method(before, force=True)


def rows_that(read: Callable[[int], object], has_files: bool = True) -> DecodedSamples:
    """Rows of one input; reading that of a row calls this function with its number."""

    class Row(dict[str, Cell]):
        def __getitem__(self, name: str) -> Cell:
            cell = super().__getitem__(name)
            read(cell.literal)
            return cell

    rows = [Row(number=Cell("integer", row)) for row in range(20)]
    ids = [(row, 0) for row in range(20)]
    return DecodedSamples(rows, rows, ids, lambda row, name, error: error, has_files)


def test_rows_are_decoded_while_one_is_used_and_no_more_than_a_few() -> None:
    """One is used, two wait, and one waits for room; the thread ends with the loader."""
    before = threading.active_count()
    taken: list[int] = []
    enough = Event()

    def read(row: int) -> None:
        taken.append(row)
        if len(taken) == 4:
            enough.set()

    order = micro_batches(*((row,) for row in range(20)))
    batches = load_batches(rows_that(read), order, 0)
    assert next(batches).samples[0].values == {"number": 0}
    assert enough.wait(LIMIT)
    batches.close()
    assert taken == [0, 1, 2, 3]
    assert threading.active_count() == before


@dataclass(frozen=True)
class Failing:
    """A source whose second row fails."""

    error: BaseException

    def sample(self, row: int, chunk: int = 0, *_: object) -> Sample:
        if row == 1:
            raise self.error
        return Sample({"number": row}, frozenset())


@pytest.mark.parametrize("way", ["here", "in a thread", "in a process"])
@pytest.mark.parametrize(
    "error",
    [
        UsageError("a.csv:3:image", "is damaged", "look", "again"),
        StateError("s", "w"),
        SystemFault("p", "full"),
        OSError("no such device"),
    ],
    ids=repr,
)
def test_an_error_keeps_its_class_its_message_and_its_place_in_the_order(
    error: Exception, way: str
) -> None:
    source: SampleSource = Failing(error)
    if way == "in a thread":

        def read(row: int) -> None:
            if row == 1:
                raise error

        source = rows_that(read)
    order = micro_batches((0,), (1,), (2,))
    batches = load_batches(source, order, int(way == "in a process"))
    assert next(batches).samples[0].values == {"number": 0}
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert type(caught.value) is type(error)
    assert str(error) in str(caught.value)
    help_lines = getattr(error, "help_lines", None)
    assert getattr(caught.value, "help_lines", None) == help_lines


@pytest.mark.parametrize(
    ("kind", "workers"), [("stored", 0), ("stored", 1), ("rows", 1)]
)
def test_a_file_damaged_after_the_check_is_named_from_any_process(
    filled: Place, kind: str, workers: int
) -> None:
    source: SampleSource = unsplit_rows(filled)
    path = filled.data / "1.png"
    if kind == "stored":
        source, (path,) = filled.stored(), filled.shards
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises((StateError, UsageError), match=path.name):
            loaded(source, workers)
    finally:
        path.write_bytes(whole)


@dataclass(frozen=True)
class Signalled:
    """A source whose second row is never read: its process gets a signal."""

    number: int

    def sample(self, row: int, chunk: int = 0, *_: object) -> Sample:
        if row == 1:
            os.kill(os.getpid(), self.number)
        return Sample({"number": row}, frozenset())


@pytest.mark.parametrize("workers", [0, 2])
def test_what_hangs_is_named_by_the_row_that_is_waited_for(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that does not answer, or where a process was stopped."""
    monkeypatch.setattr("dstrain.training.loader.END_PATIENCE", 0.05)
    others = multiprocessing.active_children()
    answer = Event()
    read: list[bool] = []
    source: SampleSource = Signalled(signal.SIGSTOP)
    if not workers:
        source = rows_that(lambda row: read.append(answer.wait(LIMIT)))
    order = micro_batches((1,), (0,), (2,), (1,))
    batches = load_batches(source, order, workers, "metadata.csv:{}".format)
    with monkeypatch.context() as patch:
        patch.setattr("dstrain.training.loader.HUNG_AFTER", 0.5)
        with pytest.raises(SystemFault, match=r"metadata\.csv:1: nothing was loaded"):
            next(batches)
    assert not read
    answer.set()
    assert multiprocessing.active_children() == others
    if workers:
        # The next loader notices the death of its processes as before.
        dying = load_batches(Signalled(signal.SIGKILL), micro_batches((1,)), 1)
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            next(dying)


def test_a_process_that_something_else_starts_meanwhile_lives_on() -> None:
    batches = load_batches(Signalled(0), ORDER, 1)
    next(batches)
    other = multiprocessing.Process(target=time.sleep, args=(LIMIT,))
    other.start()
    batches.close()
    assert multiprocessing.active_children() == [other]
    other.kill()
    other.join()


# Torch's iterator expects to have been made as a whole when it is deleted.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_they_are_started_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = multiprocessing.active_children()
    start, started = BaseProcess.start, []

    def interrupted(process: BaseProcess) -> None:
        if started:
            raise KeyboardInterrupt
        started.append(process)
        start(process)

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        next(load_batches(Signalled(0), ORDER, 2))
    assert started
    assert caught.tb is not None  # which keeps torch's iterator
    assert multiprocessing.active_children() == others
    del caught
    gc.collect()
