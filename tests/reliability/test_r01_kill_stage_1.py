"""Stage 1 killed one to four times, each at any write (kill -9), leaves a cache that
the same command completes.
"""

import itertools
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dstrain.cache.store import ShardWriter
from dstrain.errors import StateError
from dstrain.runs.stage_1 import computing, precompute as stage_1

from tests.support import caching_family
from tests.support.caching_family import runs
from tests.support.caching_project import (
    Place,
    alone,
    change_weights,
    write_place,
    write_rows,
)
from tests.support.forks import fork

SEEDS = 50
PER_SHARD = 4
"""Images in a shard."""
WAITING = 1
"""Images that wait for the writer."""


@dataclass(frozen=True)
class Kind:
    """A run that is killed: `change` is made to a filled cache's data (None: the cache
    is empty); it takes `images`.

    last: its first kill is at one of so many writes.
    """

    name: str
    images: int
    change: Callable[[Place], object] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    last: int = 15

    def __str__(self) -> str:
        return self.name


def another_data_set(place: Place) -> None:
    """Half of the rows are gone, two have another caption."""
    del place.rows[6:]
    for row in place.rows[:2]:
        row["prompt"] += " more"
    write_rows(place.data, place.rows)


KINDS = (
    Kind("empty cache", 12),
    Kind("new weights", 12, partial(change_weights, "vae")),
    Kind("other rows", 0, another_data_set, last=8),
    Kind("another dtype beside", 12, lambda place: None, {"mixed_precision": "bf16"}),
)


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(caching_family, "LOG", tmp_path / "log")
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path / "nothing"))
    caching_family.LOG.touch()
    yield


def killed_at(event: int, work: Callable[[], None]) -> bool:
    """Fork, work in the child and kill -9 it at its n-th event that writes; a file just
    opened is there, and empty.
    """
    pid = fork()
    if pid == 0:
        left = [event]

        def hook(name: str, arguments: Any) -> None:
            opened = name == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if opened or name in ("os.rename", "os.remove", "os.mkdir"):
                left[0] -= 1
                if left[0] == 0:
                    # An exclusive open of a file that is there fails, in the run as here.
                    with suppress(OSError):
                        if opened:
                            os.close(os.open(arguments[0], arguments[2], 0o666))
                    os.kill(os.getpid(), signal.SIGKILL)

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.promise(
    "R1", "stage 1 survives kill -9: the cache equals an uninterrupted one"
)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stage_1_survives_kill_9(
    kind: Kind,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counted: Callable[[str, int], None],
) -> None:
    place = write_place(tmp_path / "place", rows=12)
    monkeypatch.setattr(computing, "WAITING", WAITING)
    monkeypatch.setattr(
        stage_1, "ShardWriter", partial(ShardWriter, max_bytes=PER_SHARD * 18 * 2**10)
    )
    if kind.change is not None:
        place.fill()
        kind.change(place)
    place.fill(**kind.config, feature_cache=place.folder / "whole")
    chance = random.Random(f"{kind} {seed}")
    spent: Counter[str] = Counter()
    done = kills = 0
    for turn in range(chance.randint(1, 4)):
        event = chance.randint(1, 50 if turn else kind.last)
        kills += killed_at(
            event, lambda: stage_1.data_process(place.setup(**kind.config), alone())
        )
        spent += runs()
        stored = [
            p
            for p in (place.cache / "shards").glob("*.safetensors")
            if not p.name.startswith(".tmp-")
        ]
        assert len(stored) >= done
        done = len(stored)
    counted("kills", kills)
    assert kills
    spent += place.fill(**kind.config)
    whole = place.folder / "whole"
    # A full shard is written when the next image has been computed; others wait then.
    in_flight = PER_SHARD + 1 + WAITING
    assert spent["encode_image"] <= kind.images + kills * in_flight, (
        f"seed {seed}: {kills} kills"
    )
    assert place.values(**kind.config) == place.values(
        **kind.config, feature_cache=whole
    ), f"seed {seed}"
    rows, wanted = (
        place.stored(**kind.config, **where).rows
        for where in ({}, {"feature_cache": whole})
    )
    assert list(rows) == list(wanted)
    assert not list(place.cache.rglob(".tmp-*"))


def test_every_crash_point_of_a_plan_leaves_the_older_or_the_newer_one(
    tmp_path: Path,
) -> None:
    place = write_place(tmp_path / "place")
    place.fill()
    older = place.values()
    weights = place.folder / "model/vae/model.safetensors"
    with_older = weights.read_bytes()
    change_weights("vae", place)
    with_newer = weights.read_bytes()
    place.fill(feature_cache=place.folder / "newer")
    newer = place.values(feature_cache=place.folder / "newer")
    found = set()
    for event in itertools.count(1):
        killed = killed_at(event, lambda: stage_1.data_process(place.setup(), alone()))
        try:
            assert place.values() == newer
            found.add(True)
        except StateError:
            # The older plan is there, which the newer weights do not fit.
            weights.write_bytes(with_older)
            assert place.values() == older
            weights.write_bytes(with_newer)
            found.add(False)
        if not killed:
            break
    assert found == {False, True}
