"""A process that ends, in whatever way and at whatever moment, ends the run of several;
what was saved is whole.
"""

import json
import os
import pkgutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.cache import FeatureCache, ShardWriter, stored_plans
from dstrain.distributed import liveness, world
from dstrain.distributed.liveness import Heartbeat
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.saved_states import damage
from dstrain.runs.launch import accelerator
from dstrain.runs.stage_1 import computing, precompute
from dstrain.runs.stage_1.computing import WAITING

from tests.support.caching_project import plain
from tests.support.family import weights_of, write_data
from tests.support.processes import (
    Ended,
    commands,
    in_processes,
    wait_for,
    when_the_others_have_ended,
    words,
)
from tests.support.runs import log, outcome, plan_digests, same, warm_project

pytestmark = [
    pytest.mark.promise(
        "R9", "a dead process ends the run in time; no checkpoint is incomplete"
    ),
    pytest.mark.usefixtures("tiny"),
]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def bad_sample() -> None:
    raise UsageError("metadata.csv:3:image", "is no image")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def defect() -> None:
    raise ZeroDivisionError("division by zero")


WAYS: dict[str, tuple[Callable[[], None], int, str]] = {
    "kill -9": (kill, -9, ""),
    "a bad sample": (bad_sample, 2, "metadata.csv:3:image: is no image"),
    "out of memory": (out_of_memory, 6, "out of memory"),
    "a defect": (defect, 1, "ZeroDivisionError: division by zero"),
}
"""Name -> what the process does, its exit code, what it says."""


@dataclass(frozen=True)
class Case:
    """A process (`rank` of `size`) ends at its call number `call` (from 1) of a
    function.

    launched: whether a launcher sends SIGTERM to the others then.
    """

    stage: str
    function: str
    rank: int
    way: str = "kill -9"
    call: int = 1
    size: int = 2
    launched: bool = True
    workers: int = 0

    def __str__(self) -> str:
        alone = "" if self.launched else ", no launcher"
        workers = f", {self.workers} workers" if self.workers else ""
        place = self.function.removeprefix("dstrain.")
        return f"{self.way} in {self.stage} at {place} {self.call}, {self.rank} of {self.size}{alone}{workers}"


STAGE_1, TRAIN = "stage 1", "training"
KEY_ROWS = "dstrain.runs.stage_1.precompute.key_rows"
FROM_FOUND = "dstrain.pipeline.pipeline.Pipeline.from_found"
RUN_UNIT = "dstrain.pipeline.pipeline.Pipeline.run"
FLUSH = "dstrain.cache.store.ShardWriter.flush"
FORWARD = "dstrain.training.module.TrainingModule.forward"
CLIP = "dstrain.training.updater.clip_gradients"
SAVE = "dstrain.runs.checkpoints.outputs.RunDirectory.save"
CASES = (
    # Stage 1: while files are read, encoders loaded, rows computed, a shard and the
    # plan written.
    Case(STAGE_1, KEY_ROWS, 0),
    Case(STAGE_1, KEY_ROWS, 0, launched=False),
    Case(STAGE_1, KEY_ROWS, 1, "a bad sample", launched=False),
    Case(STAGE_1, FROM_FOUND, 1),
    Case(STAGE_1, FROM_FOUND, 0, "a defect"),
    Case(STAGE_1, FROM_FOUND, 2, size=3, launched=False),
    Case(STAGE_1, RUN_UNIT, 1, call=2),
    Case(STAGE_1, RUN_UNIT, 1, "a bad sample", call=2),
    Case(STAGE_1, RUN_UNIT, 0, call=2, launched=False),
    Case(STAGE_1, RUN_UNIT, 1, call=2, workers=1),
    Case(STAGE_1, FLUSH, 1, call=1, launched=False),
    Case(STAGE_1, "dstrain.cache.backend.plan_files.write_plan", 0),
    # Training: while it is set up, in a step, while the first process saves.
    Case(TRAIN, "dstrain.runs.start_training.open_training_data", 1),
    Case(TRAIN, FROM_FOUND, 0, "a bad sample"),
    Case(TRAIN, FROM_FOUND, 1, launched=False),
    Case(TRAIN, FORWARD, 1, call=1),
    Case(TRAIN, FORWARD, 0, call=6),
    Case(TRAIN, FORWARD, 1, call=6, launched=False),
    Case(TRAIN, FORWARD, 1, "out of memory", call=6),
    Case(TRAIN, FORWARD, 1, "a bad sample", call=6, launched=False),
    Case(TRAIN, FORWARD, 2, call=4, size=3),
    Case(TRAIN, FORWARD, 1, call=6, workers=1, launched=False),
    Case(TRAIN, CLIP, 1, call=6),
    Case(TRAIN, CLIP, 0, "a defect", call=6),
    Case(TRAIN, "dstrain.distributed.world.ProcessGroup.any", 0, call=6),
    Case(TRAIN, "dstrain.runs.checkpoints.state.write_tensors", 0, call=3),
    Case(TRAIN, "dstrain.runs.checkpoints.state.write_json", 0, call=4, launched=False),
    Case(TRAIN, "dstrain.runs.checkpoints.outputs.save_state", 0, "a defect", call=2),
    Case(TRAIN, SAVE, 1, call=2),
    Case(TRAIN, SAVE, 1, "a bad sample", call=2, launched=False),
)


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_project(tmp_path_factory.mktemp("project"), dropout=0.2)


def flags(here: Path, stage: str, folder: Path, **changes: Any) -> dict[str, Any]:
    files = json.dumps(list(weights_of(here / "model").values()))
    common = {
        "model": "tiny",
        "dataset_base_path": here / "data",
        "model_paths": files,
        **changes,
    }
    if stage == STAGE_1:
        return {**common, "task": "sft:data_process", "feature_cache": folder}
    return {
        **common,
        "output_path": folder,
        "learning_rate": 1e-2,
        "lora_rank": 2,
        "num_epochs": 3,
        "save_steps": 2,
    }


def at(
    function: str, call: int, own: int, act: Callable[[], None], line: Sequence[str]
) -> Callable[[int], int]:
    """The command line, in which process number `own` acts at a call of a function."""

    def work(rank: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            if rank == own:
                place, _, name = function.rpartition(".")
                owner = pkgutil.resolve_name(place)
                patch.setattr(owner, name, until(call, getattr(owner, name), act))
            return commands(line)(rank)

    return work


def until(
    call: int, function: Callable[..., Any], act: Callable[[], None]
) -> Callable[..., Any]:
    """The function, which first does something else at the call of this number."""
    left = [call]

    def watched(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            act()
        return function(*arguments, **named)

    return watched


def values(folder: Path) -> list[Any]:
    """The rows of the cached plan, with every value as bytes."""
    feature_cache = FeatureCache.open(folder)
    (plan,) = stored_plans(folder)
    return [
        (
            row["row"],
            {
                name: plain(feature_cache.read(form["at"]))
                for name, form in row["values"].items()
                if "at" in form
            },
        )
        for row in plan.samples()
    ]


def check_end(ended: Ended, case: Case) -> None:
    """Everybody ended by itself, with one line each: the process of the case its own, the
    others that it ended.
    """
    _, code, said = WAYS[case.way]
    assert ended.codes[case.rank] == code, ended.said
    others = [code for rank, code in enumerate(ended.codes) if rank != case.rank]
    assert others == [4] * len(others), (ended.codes, ended.said)
    assert "Traceback" not in "".join(ended.said)
    assert (
        sum(
            "processes: another process of the run ended" in line
            for line in ended.lines
        )
        == 1
    ), ended.lines
    assert (
        sum(said in line for line in ended.lines) == 1
        if said
        else len(ended.lines) == 1
    ), ended.lines


def run(size: int, flags: dict[str, Any], folder: Path) -> None:
    """Run a command line to its end in so many processes."""
    ended = in_processes(size, commands(words(flags)), folder)
    assert ended.codes == (0,) * size, ended.said


@pytest.fixture(scope="module")
def uncut(here: Path) -> Callable[[str, int], Path]:
    """Stage and number of processes -> the folder of a run in which nobody died."""

    @cache
    def made(stage: str, size: int) -> Path:
        folder = here / f"{stage} {size}"
        run(1 if stage == STAGE_1 else size, flags(here, stage, folder), here)
        return folder

    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_process_that_ends_ends_the_run_and_the_same_command_completes_it(
    case: Case, here: Path, tmp_path: Path, uncut: Callable[[str, int], Path]
) -> None:
    folder, whole = tmp_path / "cut", uncut(case.stage, case.size)
    more = {"dataset_num_workers": case.workers} if case.workers else {}
    given = flags(here, case.stage, folder, **more)
    work = at(case.function, case.call, case.rank, WAYS[case.way][0], words(given))
    check_end(in_processes(case.size, work, tmp_path, case.launched), case)
    if case.stage == STAGE_1:
        run(case.size, given, tmp_path)
        assert values(folder) == values(whole)
        assert not list(folder.rglob(".tmp-*"))
        return
    assert not [state for state in states(folder) if damage(state)]
    run(case.size, {**given, "resume": "auto" if states(folder) else None}, tmp_path)
    if case.size == 2:
        assert same(outcome(whole), outcome(folder))
    else:  # more than two numbers are not always added in one order
        assert [row["loss"] for row in log(folder)] == pytest.approx(
            [row["loss"] for row in log(whole)], rel=1e-5
        )


ROWS = 48
PER_SHARD = 2
"""Samples in a shard of the runs of four processes."""
SAMPLE_BYTES = 328
"""Of the values of a sample: a text of 7 letters, an image of 16 x 16."""
LOST = PER_SHARD + WAITING
"""Most samples that a kill loses: those in the shard in progress, and those that wait to
be written."""
ARRIVALS = ((3, 2, 1, 0), (0, 2, 1, 3), (1, 0, 3, 2), (0, 0, 0, 0))
"""When each of four processes comes to its samples, in units of delay."""
DELAY = 0.1
PACE = 0.015
"""Seconds that the others take for a unit: they have shards in progress as one dies."""


@dataclass(frozen=True)
class Death:
    """A process of four is killed at its call number `call` (from 1) of a function."""

    rank: int
    arrival: int
    """Its number in ARRIVALS."""
    launched: bool
    function: str
    call: int

    def __str__(self) -> str:
        alone = "" if self.launched else ", no launcher"
        name = self.function.rpartition(".")[2]
        return f"{self.rank}, arrival {self.arrival}, {name} {self.call}{alone}"


RENAME = "pathlib.Path.replace"
"""Of a shard, from its temporary name; other files are not counted."""
COMMITTED = "dstrain.cache.store.FeatureCache.add"
"""A shard has its name, and its writer goes on."""
SHARDS_BEFORE = {FLUSH: 1, RENAME: 1, COMMITTED: 0}
"""A function -> by how many a process that dies at a call of it has fewer shards."""
AT_FIRST = tuple(
    Death(rank, (rank + turn) % 4, launched, RUN_UNIT, 2)
    for turn, launched in ((0, True), (1, False))
    for rank in range(4)
)
"""After the first unit; nothing is in a shard."""
IN_A_SHARD = (
    Death(1, 3, False, RUN_UNIT, 22),
    Death(2, 0, True, RUN_UNIT, 18),
    Death(3, 1, False, RUN_UNIT, 20),
    Death(0, 2, True, RUN_UNIT, 24),
)
"""In one of the last samples of a share of twelve, between its two units."""
AT_A_COMMIT = (
    Death(2, 3, True, RENAME, 3),
    Death(0, 3, False, FLUSH, 4),
    Death(1, 0, True, COMMITTED, 3),
    Death(3, 2, False, RENAME, 5),
    Death(0, 1, False, RENAME, 2),
    Death(3, 3, True, COMMITTED, 5),
)


@pytest.fixture(scope="module")
def many(here: Path) -> Path:
    """A dataset in which no two samples have a value in common."""
    folder = here / "many"
    write_data(folder, tuple(f"word {i:02}" for i in range(ROWS)), ((16, 16),))
    return folder


@dataclass(frozen=True)
class Computed:
    """What the processes of a run computed, by rank: of each unit that ran, the row and
    the addresses of its values.
    """

    units: list[list[tuple[str, frozenset[str]]]]
    ended: Ended
    unfinished: list[Path]
    """What shards were called while they were written."""

    def kept(self, folder: Path) -> list[frozenset[str]]:
        """The units of all processes whose values are in the cache."""
        there = set(FeatureCache.open(folder))
        return [values for ran in self.units for _, values in ran if values <= there]

    def rows(self, rank: int) -> set[str]:
        """The rows of which a process computed something."""
        return {row for row, _ in self.units[rank]}

    def lost_rows(self, rank: int, folder: Path) -> set[str]:
        """The rows of which a process computed what is not in the cache."""
        there = set(FeatureCache.open(folder))
        return {row for row, values in self.units[rank] if not values <= there}


def fill(
    here: Path, many: Path, folder: Path, size: int, death: Death | None = None
) -> Computed:
    """Fill a cache in so many processes, one of which dies if there is a death."""
    notes = [
        folder.with_name(f"{folder.name}-{time.monotonic_ns()}-{i}")
        for i in range(size)
    ]
    compute, compute_step = computing.compute, computing.compute_step
    delays = ARRIVALS[death.arrival] if death else (0,) * size

    def late(*given: Any) -> None:
        time.sleep(DELAY * delays[given[5].rank])
        compute(*given)

    def noted(*given: Any) -> None:
        compute_step(*given)
        step, sample, rank = given[2], given[3], given[6]
        row, _ = sample.sample_id
        values = [sample.addresses[name] for name in step.outputs.values()]
        with notes[rank].open("a") as file:
            file.write(f"{' '.join([str(row), *values])}\n")
        if death and rank != death.rank:
            time.sleep(PACE)

    line = words(flags(here, STAGE_1, folder, dataset_base_path=many))
    small = partial(ShardWriter, max_bytes=PER_SHARD * SAMPLE_BYTES)
    work = commands(line) if death is None else dying(death, line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute, "ShardWriter", small)
        patch.setattr(precompute, "compute", late)
        patch.setattr(computing, "compute_step", noted)
        ended = in_processes(size, work, here, death is None or death.launched)
    lines = [note.read_text().splitlines() if note.exists() else [] for note in notes]
    parts = [[line.split() for line in ran] for ran in lines]
    units = [[(row, frozenset(values)) for row, *values in ran] for ran in parts]
    return Computed(units, ended, list((folder / "shards").glob(".tmp-*")))


def dying(death: Death, line: Sequence[str]) -> Callable[[int], int]:
    """The command line, in which the process of a death is killed."""
    if death.function != RENAME:
        return at(death.function, death.call, death.rank, kill, line)
    rename = Path.replace
    watched = until(death.call, rename, kill)

    def replace(path: Path, target: Path) -> Path:
        function = watched if target.parent.name == "shards" else rename
        renamed: Path = function(path, target)
        return renamed

    def work(rank: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            if rank == death.rank:
                patch.setattr(Path, "replace", replace)
            return commands(line)(rank)

    return work


@pytest.fixture(scope="module")
def whole(here: Path, many: Path) -> tuple[Path, Computed]:
    """A cache that one process filled at once, and what it computed."""
    folder = here / "whole"
    computed = fill(here, many, folder, 1)
    assert computed.ended.codes == (0,), computed.ended.said
    return folder, computed


@pytest.mark.parametrize("death", AT_FIRST + IN_A_SHARD + AT_A_COMMIT, ids=str)
def test_one_of_four_dies_in_stage_1_and_any_number_of_processes_completes_it(
    death: Death, here: Path, many: Path, whole: tuple[Path, Computed], tmp_path: Path
) -> None:
    """It loses the shard in progress and the samples that wait to be written, the others
    nothing; another number of processes computes just the rest.
    """
    (folder, once), cut = whole, tmp_path / "cut"
    died = fill(here, many, cut, 4, death)
    codes = [-9 if rank == death.rank else 4 for rank in range(4)]
    assert list(died.ended.codes) == codes, died.ended.said
    assert len(died.ended.lines) == 1, died.ended.said
    for rank in range(4):
        lost = died.lost_rows(rank, cut)
        # Who gets the launcher's signal in the middle of a sample loses that one.
        most = LOST if rank == death.rank else int(death.launched)
        assert len(lost) <= most, (rank, lost)
    if death.function in SHARDS_BEFORE:
        shards = death.call - SHARDS_BEFORE[death.function]
        stored = died.rows(death.rank) - died.lost_rows(death.rank, cut)
        assert len(stored) == shards * PER_SHARD
        assert len(died.unfinished) == (death.function == RENAME)
    kept = died.kept(cut)
    size = 1 + (death.rank + 1) % 4  # another number, in one of the cases one process
    again = fill(here, many, cut, size)
    assert again.ended.codes == (0,) * size, again.ended.said
    assert Counter(kept + again.kept(cut)) == Counter(once.kept(folder))
    assert values(cut) == values(folder)
    assert plan_digests(cut) == plan_digests(folder)
    assert not list(cut.rglob(".tmp-*"))
    if death.function == RUN_UNIT:
        assert len(died.units[death.rank]) == death.call - 1


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


HUNG = (
    (TRAIN, FORWARD, 1),
    (TRAIN, CLIP, 0),
    (STAGE_1, RUN_UNIT, 1),
    (STAGE_1, RUN_UNIT, 0),
)
"""Stage, function, the process that is stopped at a call of it."""


@pytest.mark.parametrize("case", HUNG, ids=lambda case: " ".join(map(str, case)))
def test_a_process_that_hangs_ends_the_run_after_a_time_and_is_named_outside_of_steps(
    case: tuple[str, str, int],
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, function, own = case
    monkeypatch.setattr(world, "Heartbeat", partial(Heartbeat, timeout=5.0))
    monkeypatch.setattr(liveness, "INTERVAL", 0.3)
    monkeypatch.setattr(accelerator, "COLLECTIVE_LIMIT", timedelta(seconds=5))
    folder = tmp_path / "cut"
    line = words(flags(here, stage, folder))
    call = 2 if stage == STAGE_1 else 4
    ended = in_processes(
        2,
        at(function, call, own, stop, line),
        tmp_path,
        # As by a launcher.
        poke=when_the_others_have_ended(own, signal.SIGKILL),
    )
    assert ended.codes[own] == -9
    assert ended.codes[1 - own] == 4, ended.said
    (said,) = ended.lines
    named = f"process {own} (process id "
    assert (named if stage == STAGE_1 else "did not answer in time") in said
    assert not [state for state in states(folder) if damage(state)]


@dataclass(frozen=True)
class Asked:
    """A signal comes to some processes of two while the first makes call number `call`
    of a function.

    again: it comes twice, as to a launched process when Ctrl-C reaches the launcher
    too, which passes it on.
    """

    stage: str
    function: str
    number: signal.Signals = signal.SIGTERM
    ranks: tuple[int, ...] = (0, 1)
    call: int = 1
    again: bool = False

    def __str__(self) -> str:
        to = "all" if len(self.ranks) == 2 else f"process {self.ranks[0]}"
        twice = " twice" if self.again else ""
        place = f"{self.stage} at {self.function} {self.call}"
        return f"{self.number.name}{twice} to {to} in {place}"


ASKED = (
    Asked(TRAIN, FORWARD, call=5),
    Asked(TRAIN, FORWARD, ranks=(0,), call=5),
    Asked(TRAIN, FORWARD, ranks=(1,), call=7),
    Asked(TRAIN, FORWARD, signal.SIGINT, call=5, again=True),
    Asked(TRAIN, SAVE, call=2, again=True),
    Asked(TRAIN, FROM_FOUND),
    Asked(TRAIN, FROM_FOUND, signal.SIGINT, again=True),
    Asked(STAGE_1, KEY_ROWS),
    Asked(STAGE_1, RUN_UNIT, call=2),
    Asked(STAGE_1, RUN_UNIT, signal.SIGINT, call=2, again=True),
)


@pytest.mark.parametrize("case", ASKED, ids=str)
def test_processes_that_get_a_signal_save_once_and_end_together(
    case: Asked, here: Path, tmp_path: Path, uncut: Callable[[str, int], Path]
) -> None:
    folder, whole = tmp_path / "cut", uncut(case.stage, 2)
    given = flags(here, case.stage, folder)
    now, sent = tmp_path / "now", tmp_path / "sent"

    def signalled() -> None:
        now.touch()
        wait_for(sent)

    def launcher(pids: Sequence[int]) -> None:
        wait_for(now)
        for _ in range(1 + case.again):
            for rank in case.ranks:
                os.kill(pids[rank], case.number)
            time.sleep(0.05)  # else both may arrive as one
        sent.touch()

    ended = in_processes(
        2,
        at(case.function, case.call, 0, signalled, words(given)),
        tmp_path,
        poke=launcher,
    )
    assert ended.codes == (75, 75), "\n".join(ended.said)
    assert len(ended.lines) == 1, ended.lines
    assert "interrupted" in ended.lines[0]
    assert "Traceback" not in "".join(ended.said)
    assert not [state for state in states(folder) if damage(state)]
    if case.stage == TRAIN and "from_found" not in case.function:
        assert "where it was saved" in ended.lines[0]
        assert states(folder)
    run(
        2,
        {**given, "resume": "auto" if case.stage == TRAIN and states(folder) else None},
        tmp_path,
    )
    if case.stage == STAGE_1:
        assert values(folder) == values(whole)
    else:
        assert log(folder) == log(whole)
        assert same(outcome(whole)["state"], outcome(folder)["state"])
