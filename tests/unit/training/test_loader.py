"""Samples come in the order asked for, from any number of processes, and errors keep
their class and message.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import Sample, SampleKey, StateError, SystemFault, UsageError
from dstrain.data import Cell
from dstrain.plugin import Column
from dstrain.runs import Setup, data_process, open_training_data
from dstrain.training import (
    DecodedSamples,
    MicroBatch,
    SampleSource,
    load_batches,
    loader as samples,
)

from tests.support.caching_family import runs
from tests.support.caching_project import (
    Place,
    alone,
    filled_place,
    log_units,
    plain,
    write_place,
    write_rows,
)
from tests.support.videos import film, seconds, steady


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with filled_place(tmp_path_factory.mktemp("filled")) as place:
        yield place


def micro_batches(*rows: tuple[int, ...]) -> list[MicroBatch]:
    return [
        MicroBatch(
            tuple(SampleKey(0, 0, 0, row) for row in part), (1.0,) * len(part), 1, True
        )
        for part in rows
    ]


ORDER = micro_batches((3, 0), (1,), (2, 2), (0,), (1, 3), (0, 1, 2, 3))


def unsplit_rows(place: Place) -> DecodedSamples:
    dataset = place.setup("").dataset
    return DecodedSamples(
        dataset.rows, dataset.rows, dataset.sample_ids, dataset.damage
    )


def loaded(source: SampleSource, workers: int) -> list[Any]:
    return [
        (
            batch.micro_batch,
            [(plain(sample.values), sample.inputs) for sample in batch.samples],
        )
        for batch in load_batches(source, ORDER, workers)
    ]


@pytest.mark.parametrize("kind", ["rows", "stored"])
def test_samples_are_the_same_from_processes_that_are_spawned(
    filled: Place, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: SampleSource = filled.stored() if kind == "stored" else unsplit_rows(filled)
    here = loaded(source, 0)
    assert [micro for micro, _ in here] == ORDER
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert loaded(source, 2) == here
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_samples_are_the_same_from_processes_that_are_forked(filled: Place) -> None:
    source = filled.stored()
    assert loaded(source, 2) == loaded(source, 0)


def test_only_the_inputs_that_a_run_reads_are_decoded(
    filled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Cell] = []
    monkeypatch.setattr(samples, "load_cell", lambda cell, check: opened.append(cell))
    source = unsplit_rows(filled)
    used = [{"prompt", "reference"}] * len(source.rows)
    sample = replace(source, used_inputs=used).sample(0)
    assert set(sample.values) == {"prompt", "reference"}
    assert sample.inputs == set(source.rows[0])
    assert len(opened) == 2


@pytest.mark.parametrize("has_files", [True, False])
def test_a_thread_decodes_files_and_nothing_else(
    has_files: bool, filled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def load_cell(cell: Cell, check: bool) -> None:
        threads.add(threading.current_thread())

    monkeypatch.setattr(samples, "load_cell", load_cell)
    source = replace(unsplit_rows(filled), has_files=has_files)
    assert [batch.micro_batch for batch in load_batches(source, ORDER, 0)] == ORDER
    assert (threading.main_thread() not in threads) == has_files


def test_a_signal_ends_the_wait_for_a_file(
    filled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that does not answer."""
    answer = threading.Event()
    monkeypatch.setattr(samples, "POLL", 0.05)
    monkeypatch.setattr(samples, "load_cell", lambda cell, check: answer.wait(30))
    batches = load_batches(unsplit_rows(filled), ORDER, 0, lambda: True)
    threading.Timer(0.5, answer.set).start()
    with pytest.raises(samples.StoppedWaiting):
        next(batches)


def test_loading_draws_nothing_from_the_global_generator(filled: Place) -> None:
    before = torch.get_rng_state()
    loaded(filled.stored(), 1)
    assert torch.equal(torch.get_rng_state(), before)


@dataclass(frozen=True)
class Failing:
    """A source whose second row fails."""

    error: BaseException

    def sample(self, row: int, chunk: int = 0, *_: object) -> Sample:
        if row == 1:
            raise self.error
        return Sample({"row": row}, frozenset())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "error",
    [
        UsageError("a.csv:3:image", "is damaged", "look", "again"),
        StateError("s", "w"),
        SystemFault("p", "full"),
    ],
)
def test_an_error_keeps_its_class_its_message_and_its_place_in_the_order(
    error: Any, workers: int
) -> None:
    batches = load_batches(Failing(error), micro_batches((0,), (1,), (2,)), workers)
    assert next(batches).samples[0].values == {"row": 0}
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert caught.value.help_lines == error.help_lines


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unforeseen_error_keeps_its_class_and_message(workers: int) -> None:
    batches = load_batches(
        Failing(OSError("no such device")), micro_batches((1,)), workers
    )
    with pytest.raises(OSError, match="no such device"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_is_named_from_any_process(filled: Place, workers: int) -> None:
    source = filled.stored()
    (path,) = filled.shards
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises(StateError, match=f"{path.name}: is damaged"):
            loaded(source, workers)
    finally:
        path.write_bytes(whole)


def test_an_image_damaged_after_the_check_is_named_from_a_process(
    filled: Place, tmp_path: Path
) -> None:
    source = unsplit_rows(filled)
    path = filled.data / "1.png"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    try:
        with pytest.raises(UsageError, match=r"1\.png"):
            loaded(source, 1)
    finally:
        path.write_bytes(whole)


CHUNKS = {"num_frames": 5, "frame_sampling": "chunk"}


def with_videos(setup: Setup) -> Setup:
    """The same run, its image taken from a video's clip."""
    columns = {
        "input_image": Column(
            "clip", "image", "first", multiple=8, frame_multiple=4, fps=15.0
        )
    }
    return replace(
        setup,
        spec=replace(
            setup.spec, inputs=MappingProxyType({**setup.spec.inputs, **columns})
        ),
    )


@pytest.fixture
def films(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A dataset of four rows: 12 frames, 17 frames, the first again, and 3 frames."""
    log_units(monkeypatch, tmp_path)
    place = write_place(tmp_path / "place")
    for name, count in (("a", 12), ("b", 17), ("c", 3)):
        film(place.data / f"{name}.mp4", steady(count, 15), 15)
    for row, name in zip(place.rows, "abac", strict=True):
        row |= {
            "clip": f"{name}.mp4",
            "reference": "0.png",
            "references": [],
            "label": "x",
        }
        del row["image"]
    write_rows(place.data, place.rows)
    return place


def fill(place: Place, stage: str = "data_process", **config: Any) -> Setup:
    return with_videos(place.setup(stage, **config))


def test_every_clip_is_stored_once_and_read_back_by_row_and_chunk(films: Place) -> None:
    data_process(fill(films, **CHUNKS), alone())
    assert runs()["encode_image"] == 2 + 3 + 1  # the clips of the first video once
    unsplit, split = (
        open_training_data(fill(films, stage, **CHUNKS)) for stage in ("", "train")
    )
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0)]
    assert np.array_equal(split.sample_ids, places)
    assert np.array_equal(unsplit.sample_ids, places)
    assert np.array_equal(split.groups, unsplit.groups)
    latents = {
        place: plain(split.source.sample(*place).values["input_latents"])
        for place in places
    }
    assert latents[0, 0] == latents[2, 0] != latents[0, 1] == latents[2, 1]
    for row, chunk in places:
        image = unsplit.source.sample(row, chunk).values["input_image"]
        assert seconds(np.asarray(image)[None]) == pytest.approx(
            [5 * chunk / 15], abs=0.04
        )


def test_another_choice_of_frames_is_another_plan(films: Place) -> None:
    data_process(fill(films, **CHUNKS), alone())
    for other in (
        {"num_frames": 9},
        {"frame_sampling": "head"},
        {"frame_sampling": "uniform", "frame_samples": 2},
    ):
        with pytest.raises(StateError, match=r"--num_frames|--frame_sampling"):
            open_training_data(fill(films, "train", **(CHUNKS | other)))


def test_a_video_damaged_after_the_check_is_named_with_row_and_column(
    films: Place,
) -> None:
    source = open_training_data(fill(films, "", **CHUNKS)).source
    path = films.data / "b.mp4"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(
        UsageError, match=r"metadata\.csv:3:clip: .b\.mp4. is not a video"
    ):
        source.sample(1, 2)


@dataclass(frozen=True)
class Stopping:
    """A source whose second row is never read: its process stops."""

    def sample(self, row: int, chunk: int = 0, *_: object) -> Sample:
        if row == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return Sample({"row": row}, frozenset())


@dataclass(frozen=True)
class Dying:
    """A source whose process is killed."""

    def sample(self, row: int, chunk: int = 0, *_: object) -> Sample:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.mark.parametrize("asked", [False, True])
def test_a_process_that_hangs_is_named_after_a_time_and_a_signal_ends_the_wait(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "POLL", 0.2)
    monkeypatch.setattr(samples, "HUNG_AFTER", 60.0 if asked else 0.5)
    others = multiprocessing.active_children()
    order = micro_batches((0,), (1,), (2,), (1,))
    batches = load_batches(Stopping(), order, 2, lambda: asked)
    assert next(batches).samples[0].values == {"row": 0}
    if asked:
        with pytest.raises(samples.StoppedWaiting):
            next(batches)
    else:
        with pytest.raises(SystemFault, match="nothing was loaded for 0 seconds"):
            next(batches)
    assert multiprocessing.active_children() == others
    # The next loader notices the death of its processes as before.
    dying = load_batches(Dying(), micro_batches((1,)), 1)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        next(dying)


def test_the_processes_end_with_the_error_and_not_with_its_traceback() -> None:
    others = multiprocessing.active_children()
    source = Failing(UsageError("metadata.csv:3:image", "is no image"))
    with pytest.raises(UsageError) as caught:
        list(load_batches(source, micro_batches((0,), (1,), (0,), (0,)), 2))
    assert caught.tb is not None
    assert multiprocessing.active_children() == others
