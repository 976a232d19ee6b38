"""Stage 1 works on several samples at once; what is computed is kept at any end."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from dstrain import SystemFault
from dstrain.cache import ShardWriter
from dstrain.runs.stage_1 import computing
from dstrain.training import sample_sources

from tests.support.caching_family import runs
from tests.support.caching_project import Place, log_units, write_place

ROWS = 8
WAITING = 2
IMAGE = "encode_image"
Hook = Callable[[int], Any]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    log_units(monkeypatch, tmp_path)
    monkeypatch.setattr(computing, "WAITING", WAITING)
    return write_place(tmp_path / "place", rows=ROWS)


def filled(place: Place, on_image: Hook, on_value: Hook = lambda number: None) -> int:
    """Fill, calling functions with each image's and value's number; count the images."""
    values = iter(range(10 * ROWS))
    step, add = computing.compute_step, ShardWriter.add

    def compute_step(
        setup: Any, pipeline: Any, one: Any, sample: Any, *more: Any
    ) -> None:
        if one.unit.name == IMAGE:
            on_image(sample.sample_id[0])
        step(setup, pipeline, one, sample, *more)

    def added(writer: ShardWriter, address: str, value: Any) -> None:
        on_value(next(values))
        add(writer, address, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computing, "compute_step", compute_step)
        patch.setattr(ShardWriter, "add", added)
        return place.fill()[IMAGE]


def test_the_next_sample_is_decoded_while_one_is_computed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = [Event() for _ in range(ROWS)]
    load = sample_sources.load_cell

    def load_cell(cell: Any) -> Any:
        value = load(cell)
        if cell.files:
            decoded[int(Path(cell.files[0]).stem)].set()
        return value

    def wait_for_the_next(number: int) -> None:
        decoded[min(number + 1, ROWS - 1)].wait()

    monkeypatch.setattr(sample_sources, "load_cell", load_cell)
    assert filled(place, wait_for_the_next) == ROWS


def test_samples_are_computed_while_one_is_written_but_no_more_than_a_kill_may_lose(
    place: Place,
) -> None:
    computed = [Event() for _ in range(ROWS)]

    def wait(number: int) -> None:
        if number == 0:
            computed[WAITING].wait()
            assert not computed[WAITING + 1].wait(0.05)

    assert filled(place, lambda number: computed[number].set(), wait) == ROWS


class Stop(Exception):
    """Ends a stage 1."""


@pytest.mark.parametrize("end", [KeyboardInterrupt, Stop])
def test_what_is_computed_is_kept_whatever_ends_it(
    end: type[BaseException], place: Place
) -> None:
    """Also what waits for the writer, which has written nothing yet."""
    ended = Event()

    def stop(number: int) -> None:
        if number == WAITING:
            ended.set()
            raise end

    def wait(number: int) -> None:
        ended.wait()

    with pytest.raises(end):
        filled(place, stop, wait)
    runs()
    assert place.fill()[IMAGE] == ROWS - WAITING


def test_a_fault_of_the_writer_ends_stage_1_soon(place: Place) -> None:
    started: list[int] = []

    def full(number: int) -> None:
        raise SystemFault("shards", "full")

    with pytest.raises(SystemFault, match="full") as caught:
        filled(place, started.append, full)
    assert caught.value.where == "shards"
    assert len(started) <= WAITING + 1
    runs()
    assert place.fill()[IMAGE] == ROWS
