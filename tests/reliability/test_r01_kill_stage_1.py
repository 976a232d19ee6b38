"""Stage 1 killed one to four times, each at any file-system event (kill -9), leaves a
cache that the same command completes.
"""

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError
from dstrain.cache import MARKER, FeatureCache, ShardWriter, store
from dstrain.cache.backend.shards import write_shard
from dstrain.runs.stage_1 import precompute as stage_1
from dstrain.runs.stage_1.computing import WAITING

from tests.support.caching_family import Description, Latents, Prompt, runs
from tests.support.caching_project import (
    Place,
    alone,
    change_weights,
    log_units,
    write_place,
    write_rows,
)
from tests.support.crashes import events, killed_at

SEEDS = 50
ROWS = 30
PER_SHARD = 4
"""Images in a shard."""
IMAGE_BYTES = 16 * 2**10
"""Of the latents of an image of 32 x 32; they fill the shard, whatever else is in it."""
LOST = PER_SHARD + 1 + WAITING
"""Most samples that a kill loses: those in the shard in progress, one of which has other
values in the shard before it, and those that wait to be written."""
VALUES = {
    "encode_prompt": tuple(Prompt.__annotations__),
    "describe": tuple(Description.__annotations__),
    "encode_image": tuple(Latents.__annotations__),
}
"""What each unit computes."""
SLOW = 0.02
"""Seconds that a slow disk takes for a shard: time to compute more than may wait."""


@dataclass(frozen=True)
class Kind:
    """A run that is killed: `change` is made to a filled cache's data (None: the cache
    is empty).
    """

    name: str
    change: Callable[[Place], object] | None = None
    config: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name


def another_data_set(place: Place) -> None:
    """Half of the rows are gone, half of the others have another caption."""
    del place.rows[ROWS // 2 :]
    for row in place.rows[::2]:
        row["prompt"] += " more"
    write_rows(place.data, place.rows)


KINDS = (
    Kind("empty cache"),
    Kind("new weights", partial(change_weights, "vae")),
    Kind("other rows", another_data_set),
    Kind("another dtype beside", lambda place: None, {"mixed_precision": "bf16"}),
)


@dataclass(frozen=True)
class Trial:
    """What every trial of a kind starts from and ends with."""

    place: Place
    config: Mapping[str, Any]
    before: Path | None
    """A copy of the cache as the change found it."""
    total: int
    """File-system events of the run when nobody kills it."""
    needed: Mapping[str, Collection[tuple[str, ...]]]
    """Unit -> for each input that it runs for, the addresses of its values."""
    rows: list[Any]
    values: list[dict[str, Any]]
    """Those of a cache that was filled at once."""

    def prepare(self) -> None:
        """Put the cache back as it was."""
        shutil.rmtree(self.place.cache, ignore_errors=True)
        if self.before is not None:
            shutil.copytree(self.before, self.place.cache)
        runs()

    def run(self) -> None:
        stage_1.data_process(self.place.setup(**self.config), alone())

    def run_on_slow_disk(self) -> None:
        """Run stage 1 where shards are computed faster than they are written."""

        def slow(*arguments: Any) -> Any:
            time.sleep(SLOW)
            return write_shard(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "write_shard", slow)
            self.run()

    def missing(self) -> Counter[str]:
        """Unit -> for how many inputs the cache lacks one of its values."""
        there: set[str] = set()
        if (self.place.cache / MARKER).exists():
            there.update(FeatureCache.open(self.place.cache))
        return Counter(
            {
                unit: sum(not there.issuperset(addresses) for addresses in needed)
                for unit, needed in self.needed.items()
            }
        )


@pytest.fixture(scope="module", autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder below which are all places, and the log of the units."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        log_units(patch, folder)
        small = partial(ShardWriter, max_bytes=PER_SHARD * IMAGE_BYTES)
        patch.setattr(stage_1, "ShardWriter", small)
        yield folder


@pytest.fixture(scope="module")
def trial_of(root: Path) -> Callable[[Kind], Trial]:
    @cache
    def make(kind: Kind) -> Trial:
        place = write_place(root / kind.name, rows=ROWS)
        before = None
        if kind.change is not None:
            place.fill()
            before = place.folder / "before"
            shutil.copytree(place.cache, before)
            kind.change(place)
        at_once = {**kind.config, "feature_cache": place.folder / "at once"}
        place.fill(**at_once)
        rows = list(place.stored(**at_once).rows)
        needed = {
            unit: {tuple(row["values"][name]["at"] for name in names) for row in rows}
            for unit, names in VALUES.items()
        }
        values = place.values(**at_once)
        trial = Trial(place, kind.config, before, 0, needed, rows, values)
        trial.prepare()
        return replace(trial, total=events(trial.run, root))

    return make


@pytest.mark.promise(
    "R1", "stage 1 survives kill -9: the cache equals an uninterrupted one"
)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stage_1_survives_kill_9(
    kind: Kind,
    seed: int,
    root: Path,
    trial_of: Callable[[Kind], Trial],
    counted: Callable[[str, int], None],
) -> None:
    trial = trial_of(kind)
    trial.prepare()
    chance = random.Random(f"{kind} {seed}")
    body = trial.run_on_slow_disk if chance.random() < 0.5 else trial.run
    at_first = trial.missing()
    kills: Counter[str] = Counter()
    for _ in range(chance.randint(1, 4)):
        missing = trial.missing()
        event, torn = chance.randrange(trial.total), chance.random() < 0.5
        if not killed_at(event, body, root, torn):
            # It came to its end before this event: earlier runs left it less to do.
            assert runs() == +missing
            break
        left = trial.missing()
        assert left <= missing, f"seed {seed}: stored values are gone"
        lost = runs() - (missing - left)
        assert max(lost.values(), default=0) <= LOST, f"seed {seed}: lost {lost}"
        kills["kills"] += 1
        kills["before the first new shard"] += left == at_first
        kills["after the last"] += not left.total()
    assert kills, f"seed {seed}: nobody was killed"
    assert LOST < ROWS / 2, "the bound would let a run lose all that it computed"
    for name, number in kills.items():
        counted(name, number)
    missing = trial.missing()
    trial.run()
    assert runs() == +missing, f"seed {seed}"
    assert trial.place.values(**kind.config) == trial.values, f"seed {seed}"
    assert list(trial.place.stored(**kind.config).rows) == trial.rows
    assert not list(trial.place.cache.rglob(".tmp-*"))


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
    for event in count():
        killed = killed_at(
            event,
            lambda: stage_1.data_process(place.setup(), alone()),
            place.folder,
            torn=True,
        )
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
