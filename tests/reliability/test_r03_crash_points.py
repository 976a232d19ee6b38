"""Killed at any file-system event of a save, pruning, overwriting or committing a cache:
older or newer, whole.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.cache import FeatureCache, ShardWriter, stored_plans
from dstrain.cache.backend.index import create_cache
from dstrain.cache.backend.plan_files import write_plan
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.saved_states import damage, newest_state, prune_states
from dstrain.runs.checkpoints.state import TrainingState, load_state, save_state
from dstrain.storage import remove_leftovers, verify_file
from dstrain.storage.whole_folders import finish_replacing

from tests.support.crashes import again, events, everything, killed_at
from tests.support.plan_records import IDENTITY, about, plan_line
from tests.support.runs import train, tree

pytestmark = [
    pytest.mark.promise(
        "R3", "every crash point of a commit leaves an older or newer state intact"
    ),
    pytest.mark.usefixtures("tiny"),
]


def small(step: int, digest: str = "old") -> TrainingState:
    weights = {"w": torch.full((3,), float(step))}
    facts = {"decay": "0.9", "steps": str(step)}
    return TrainingState(
        step=step,
        trainable=weights,
        optimizer={"state": {}},
        scheduler={},
        config_digest=digest,
        versions={},
        average=weights,
        average_facts=facts,
    )


def saved(folder: Path, *steps: int) -> None:
    for step in steps:
        save_state(folder / f"states/step-{step}", small(step))


def check_saved(folder: Path, step: int) -> str:
    """The newest state is the old or the new one, whole; saved again, it is the new one
    and nothing else is left.
    """
    finish_replacing(folder / "states")
    state = load_state(newest_state(folder))
    assert (state.step, state.config_digest) in {(1, "old"), (step, "new")}
    assert torch.equal(state.trainable["w"], torch.full((3,), float(state.step)))
    remove_leftovers(folder / "states")
    save_state(folder / f"states/step-{step}", small(step, "new"))
    assert load_state(newest_state(folder)).config_digest == "new"
    assert {path.name for path in (folder / "states").iterdir()} == {
        "step-1",
        f"step-{step}",
    }
    return state.config_digest


def pruned(folder: Path, keep: int) -> None:
    listed = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    prune_states(folder, keep, 3, listed)


def check_pruned(folder: Path, keep: int) -> str:
    """Every state that is left is whole, and the newest is there."""
    assert all(damage(state) == "" for state in states(folder))
    assert newest_state(folder).name == "step-3"
    return "old" if len(states(folder)) > keep else "new"


def filled(folder: Path, *numbers: int) -> None:
    """Put values into a feature cache, in a shard, and a plan of all of them."""
    create_cache(folder)
    writer = ShardWriter(FeatureCache.open(folder), {})
    for number in numbers:
        writer.add(f"{number + 1:040x}", torch.full((4,), float(number)))
    writer.flush()
    cache = FeatureCache.open(folder)
    cache.write_index()
    lines = [
        plan_line(number, {"value": address})
        for number, address in enumerate(sorted(cache))
    ]
    write_plan(folder, dict(IDENTITY), about(), lines)


def check_filled(folder: Path) -> str:
    """Every value of the plan, which is the old or the new one, reads whole; filled
    again, it is the new one.
    """
    cache = FeatureCache.open(folder)
    (plan,) = stored_plans(folder)
    rows = list(plan.samples())
    assert len(rows) in (2, 4)
    for row in rows:
        address = row["values"]["value"]["at"]
        want = torch.full((4,), float(int(address, 16) - 1))
        assert torch.equal(cache.read(address), want)
    filled(folder, 2, 3)
    (plan,) = stored_plans(folder)
    assert len(plan.samples()) == 4
    assert len(list((folder / "plans").iterdir())) == 4  # a record and its columns
    assert not list(folder.rglob(".tmp-*"))
    return "old" if len(rows) == 2 else "new"


@dataclass(frozen=True)
class Operation:
    """prepare: makes what is there before. work: is killed. check: returns whether it
    found 'old' or 'new'.
    """

    prepare: Callable[[Path], object]
    work: Callable[[Path], object]
    check: Callable[[Path], str]


OPERATIONS = {
    "a state beside another": Operation(
        lambda folder: saved(folder, 1),
        lambda folder: save_state(folder / "states/step-2", small(2, "new")),
        partial(check_saved, step=2),
    ),
    "a state in the place of another": Operation(
        lambda folder: saved(folder, 1),
        lambda folder: save_state(folder / "states/step-1", small(1, "new")),
        partial(check_saved, step=1),
    ),
    "pruning to one": Operation(
        lambda folder: saved(folder, 1, 2, 3),
        partial(pruned, keep=1),
        partial(check_pruned, keep=1),
    ),
    "pruning to two": Operation(
        lambda folder: saved(folder, 1, 2, 3),
        partial(pruned, keep=2),
        partial(check_pruned, keep=2),
    ),
    "a shard and a plan": Operation(
        lambda folder: filled(folder, 0, 1),
        lambda folder: filled(folder, 2, 3),
        check_filled,
    ),
}


def test_every_crash_point_of_an_operation_leaves_the_old_or_the_new(
    tmp_path: Path, trials: Callable[[int], int]
) -> None:
    for name, operation in OPERATIONS.items():
        operation.prepare(tmp_path / "first")
        total = events(partial(operation.work, tmp_path / "first"), tmp_path)
        shutil.rmtree(tmp_path / "first")
        found = set()
        count = trials(total)
        for trial in range(count):
            event = trial * total // count
            folder = tmp_path / "again"
            operation.prepare(folder)
            assert killed_at(
                event, partial(operation.work, folder), tmp_path, torn=bool(event % 2)
            ), (name, event)
            found.add(operation.check(folder))
            shutil.rmtree(folder)
        assert total >= 5, name
        assert found == {"old", "new"} or count < total, name


FLAGS: dict[str, Any] = {"save_steps": 1, "keep_checkpoints": 1}


def check_weights(folder: Path) -> None:
    """No weights file is torn, whatever the record says of it."""
    for path in folder.glob("[!.]*.safetensors"):
        verify_file(path)


def test_every_crash_point_of_a_checkpoint_of_a_run_resumes(
    here: Path, tmp_path: Path, trials: Callable[[int], int]
) -> None:
    first, out = tmp_path / "first", tmp_path / "out"
    body = partial(again, here, out, {"max_steps": 2, **FLAGS})
    events(partial(again, here, first, {"max_steps": 1, **FLAGS}), first)
    shutil.copytree(first, out)
    total = events(body, out)
    wanted = everything(out)
    count = trials(total)
    for trial in range(count):
        shutil.rmtree(out)
        shutil.copytree(first, out)
        event = trial * total // count
        assert killed_at(event, body, out, torn=bool(event % 2))
        finish_replacing(out / "states")
        assert not damage(newest_state(out)), event
        check_weights(out)
        events(body, out)
        assert everything(out) == wanted, event


def test_at_every_crash_point_of_overwriting_the_old_run_is_there_until_the_new_one_is(
    here: Path, tmp_path: Path, trials: Callable[[int], int]
) -> None:
    first, out = tmp_path / "first", tmp_path / "out"
    flags = {"max_steps": 1, **FLAGS}
    body = partial(train, here, output_path=out, overwrite=True, seed=1, **flags)
    events(partial(again, here, first, flags), first)
    shutil.copytree(first, out)
    total = events(body, out)
    old, wanted = tree(first), everything(out)
    old.pop("run.json")
    count = trials(total)
    found = set()
    for trial in range(count):
        shutil.rmtree(out)
        shutil.copytree(first, out)
        event = trial * total // count
        assert killed_at(event, body, out, torn=bool(event % 2))
        left, aside = tree(out), tree(out / ".overwritten")
        is_new = any(not damage(one) for one in states(out))
        kept = [aside.get(name, left.get(name)) == old[name] for name in old]
        assert is_new or all(kept), event
        found.add(all(kept))
        check_weights(out)
        events(body, out)
        assert everything(out) == wanted, event
    assert found == {True, False}
