"""Stage 1 decodes, computes and writes at the same time; what is computed is kept,
whatever ends it.
"""

import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from dstrain import SystemFault
from dstrain.cache import FeatureCache, ShardWriter
from dstrain.runs.stage_1 import computing, precompute
from dstrain.training import loader

from tests.support.caching_family import runs
from tests.support.caching_project import Place, log_units, together, write_place

PATIENCE = 30.0
"""Seconds after which a wait for what goes on at the same time counts as failed."""


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_units(monkeypatch, tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return write_place(tmp_path / "place", rows=6)


def test_the_next_sample_is_decoded_while_one_is_computed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = [Event() for _ in place.rows]
    load, step = loader.load_cell, computing.compute_step

    def load_cell(cell: Any, check: bool) -> Any:
        value = load(cell, check)
        if cell.files:
            decoded[int(Path(cell.files[0]).stem)].set()
        return value

    def compute_step(*arguments: Any) -> None:
        row, _ = arguments[3].sample_id
        following = decoded[min(row + 1, len(decoded) - 1)]
        assert following.wait(PATIENCE), "nothing is decoded meanwhile"
        step(*arguments)

    monkeypatch.setattr(loader, "load_cell", load_cell)
    monkeypatch.setattr(computing, "compute_step", compute_step)
    place.fill()


def test_the_next_sample_is_computed_while_values_are_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Event] = [Event() for _ in place.rows]
    add, step = ShardWriter.add, computing.compute_step
    written: list[int] = []

    def compute_step(*arguments: Any) -> None:
        step(*arguments)
        computed[arguments[3].sample_id[0]].set()

    def write(thread: computing.WriterThread, values: Any) -> None:
        following = computed[min(len(written) + 1, len(computed) - 1)]
        assert following.wait(PATIENCE), "nothing is computed meanwhile"
        written.append(len(values))
        for address, value in values.items():
            add(thread.writer, address, value)

    monkeypatch.setattr(computing, "compute_step", compute_step)
    monkeypatch.setattr(computing.WriterThread, "_write", write)
    place.fill()
    assert len(written) == len(place.rows)


class Stop(Exception):
    """Ends a stage 1."""


@pytest.mark.parametrize("end", [KeyboardInterrupt, Stop])
def test_what_is_computed_is_kept_whatever_ends_it(
    end: type[BaseException], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what waits for the writer, which has written nothing yet."""
    step, ended = computing.compute_step, Event()

    def compute_step(*arguments: Any) -> None:
        if arguments[3].sample_id[0] == 3:
            ended.set()
            raise end
        step(*arguments)

    def write(thread: computing.WriterThread, values: Any) -> None:
        assert ended.wait(PATIENCE)
        for address, value in values.items():
            thread.writer.add(address, value)

    with monkeypatch.context() as patch:
        patch.setattr(computing, "compute_step", compute_step)
        patch.setattr(computing.WriterThread, "_write", write)
        with pytest.raises(end):
            place.fill()
    runs()
    assert place.fill()["encode_image"] == 3


def test_a_fault_of_the_writer_ends_stage_1_soon_with_its_own_message(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    step = computing.compute_step

    def full(writer: ShardWriter, *_: Any) -> None:
        raise SystemFault("shards", "no space left on device")

    def compute_step(*arguments: Any) -> None:
        started.append(arguments[3].sample_id[0])
        step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(computing, "WAITING", 1)
        patch.setattr(computing, "compute_step", compute_step)
        patch.setattr(ShardWriter, "add", full)
        with pytest.raises(SystemFault) as caught:
            place.fill()
    assert str(caught.value).startswith("dstrain: error: shards: no space left")
    # The sample whose values it wrote, and the one that was computed meanwhile.
    assert set(started) == {0, 1}
    runs()
    assert place.fill()["encode_image"] == 6


class SlowWriter:
    """Writes a value when as many are computed as may be."""

    def __init__(self) -> None:
        self.offered = 0
        self.written = 0
        self.flushed = 0

    def add(self, address: str, value: int) -> None:
        most = self.written + computing.WAITING + 1
        end = time.monotonic() + PATIENCE
        while self.offered < min(most, 8):
            assert time.monotonic() < end, "nothing is computed meanwhile"
            time.sleep(0.001)
        time.sleep(0.02)
        assert self.offered <= most
        assert value == self.written
        self.written += 1

    def flush(self) -> None:
        self.flushed = self.written


def test_no_more_samples_wait_for_the_writer_than_a_kill_may_lose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computing, "WAITING", 2)
    writer: Any = SlowWriter()
    with computing.WriterThread.of(writer) as thread:
        for value in range(8):
            writer.offered += 1
            thread.add({str(value): value})
    assert writer.flushed == 8


def test_the_main_process_shows_the_progress_of_all(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bars = []
    bar = computing.progress_bar

    def progress_bar(*arguments: Any) -> Any:
        bars.append(bar(*arguments))
        return bars[-1]

    monkeypatch.setattr(computing, "progress_bar", progress_bar)
    setup = place.setup()
    together(2, lambda one: precompute.data_process(setup, one))
    assert [bar.desc for bar in bars] == ["data_process of 2 processes"] * 2
    assert [(bar.n, bar.total) for bar in bars] == [(6, 6)] * 2
    assert len(list(FeatureCache.open(place.cache).plans())) == 1
