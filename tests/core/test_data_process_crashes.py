"""Stage 1 killed at any moment (kill -9) leaves a store that the same command completes."""

import itertools
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stored_family
import torch
from dstrain import data_process as stage_1
from dstrain.store import ShardWriter
from stored_family import runs
from stored_place import Place, alone, change_weights, write_place


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stored_family, "LOG", tmp_path / "log")
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path / "nothing"))
    stored_family.LOG.touch()
    yield


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return write_place(tmp_path / "place")


def killed_at(event: int, work: Callable[[], None]) -> bool:
    """Fork, work in the child and kill -9 it at its n-th event that writes; a file just opened is there, and empty."""
    pid = os.fork()
    if pid == 0:
        left = [event]

        def hook(name: str, arguments: Any) -> None:
            opened = name == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if opened or name in ("os.rename", "os.remove", "os.mkdir"):
                left[0] -= 1
                if left[0] == 0:
                    if opened:
                        os.close(os.open(arguments[0], arguments[2], 0o666))
                    os.kill(os.getpid(), signal.SIGKILL)

        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("seed", range(6))
def test_stage_1_survives_kill_9(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    per_shard = 4
    place = write_place(tmp_path / "place", rows=12)
    monkeypatch.setattr(stage_1, "ShardWriter", partial(ShardWriter, max_bytes=per_shard * 18 * 2**10))
    place.fill(feature_cache=place.folder / "whole")
    chance = random.Random(seed)
    kills = 0
    spent: Counter[str] = Counter()
    done = 0
    for _ in range(chance.randint(1, 4)):
        kills += killed_at(chance.randint(1, 50), lambda: stage_1.data_process(place.setup(), alone()))
        spent += runs()
        stored = [p for p in (place.cache / "shards").glob("*.safetensors") if not p.name.startswith(".tmp-")]
        assert len(stored) >= done
        done = len(stored)
    assert kills
    spent += place.fill()
    whole = place.folder / "whole"
    assert spent["encode_image"] <= 12 + kills * per_shard, f"seed {seed}: {kills} kills"
    assert place.values() == place.values(feature_cache=whole), f"seed {seed}"
    assert list(place.stored().rows) == list(place.stored(feature_cache=whole).rows)
    assert not list(place.cache.rglob(".tmp-*"))


def test_every_crash_point_of_a_plan_leaves_the_older_or_the_newer_one(place: Place) -> None:
    place.fill()
    older = place.values()
    change_weights("vae", place)
    place.fill(feature_cache=place.folder / "newer")
    newer = place.values(feature_cache=place.folder / "newer")
    found = set()
    for event in itertools.count(1):
        killed = killed_at(event, lambda: stage_1.data_process(place.setup(), alone()))
        values = place.values()
        assert values in (older, newer)
        found.add(values == newer)
        if not killed:
            break
    assert found == {False, True}
