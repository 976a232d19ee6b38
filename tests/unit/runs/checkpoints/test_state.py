"""A state comes back bit for bit, and damage is noticed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.saved_states import newest_state
from dstrain.runs.checkpoints.state import TrainingState, load_state, save_state

from tests.support.caching_project import plain

FILES = ("optimizer.safetensors", "record.json", "state.json", "trainable.safetensors")


def small(step: int) -> TrainingState:
    weights = {"w": torch.full((3,), float(step))}
    return TrainingState(step, weights, {"state": {}}, {}, "d", {})


def averaged(step: int) -> TrainingState:
    facts = {"decay": "0.9", "steps": "1"}
    average = {"w": torch.arange(3.0)}
    return replace(small(step), average=average, average_facts=facts)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_state_comes_back_as_it_was_types_included(tmp_path: Path) -> None:
    optimizer = {
        "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2).bfloat16()}, 3: {}},
        "param_groups": [{"betas": (0.8, 0.95), "params": [0, 1], "fused": None}],
        "numbers": [0.1 + 0.2, float("inf"), -0.0, 2**70, 5e-324, True, 1],
        "nan": torch.tensor(float("nan")),
    }
    scheduler = {"by size": {64: (1, 2)}, "_last_lr": [1e-4]}
    state = replace(small(3), optimizer=optimizer, scheduler=scheduler)
    for name in "ab":
        save_state(tmp_path / name, state)
    assert names(tmp_path / "a") == [*FILES]
    for name in FILES:
        one, other = tmp_path / "a" / name, tmp_path / "b" / name
        assert one.read_bytes() == other.read_bytes()
    assert repr(plain(vars(load_state(tmp_path / "a")))) == repr(plain(vars(state)))


@pytest.mark.parametrize("value", [{1, 2}, object(), {(1, 2): 3}, {None: 1}])
def test_what_cannot_be_kept_is_refused_by_place(tmp_path: Path, value: Any) -> None:
    with pytest.raises(StateError) as caught:
        save_state(tmp_path / "s", replace(small(1), optimizer={"deep": value}))
    assert caught.value.where == "optimizer/deep"
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "s", small(1))
    record = json.loads((tmp_path / "s/record.json").read_text())
    (tmp_path / "s/record.json").write_text(json.dumps(record | {"version": 2}))
    with pytest.raises(StateError, match="'version': 2"):
        load_state(tmp_path / "s")


def test_the_newest_whole_state_is_found_or_none_and_those_passed_over_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (9, 10, 100):
        save_state(tmp_path / f"states/step-{step}", small(step))
    assert newest_state(tmp_path).name == "step-100"
    assert capsys.readouterr().err == ""
    (tmp_path / "states/step-100/state.json").write_text("{}")
    for name in ("step-2000", "step-11", "of-mind", "step-3000.old"):
        (tmp_path / "states" / name).mkdir()
    (tmp_path / "states/step-2000/record.json").touch()
    (tmp_path / "states/step-3000.old/record.json").touch()
    (tmp_path / "states/step-11/notes.txt").touch()
    assert newest_state(tmp_path).name == "step-10"
    said = [line.split(": ") for line in capsys.readouterr().err.splitlines()]
    assert [Path(line[3]).name for line in said] == ["step-2000", "step-100"]
    found = [path.name for path in states(tmp_path)]
    assert found == ["step-2000", "step-100", "step-10", "step-9"]
    for name in ("step-9", "step-10"):
        (tmp_path / "states" / name / "record.json").unlink()
    with pytest.raises(StateError) as caught:
        newest_state(tmp_path)
    assert caught.value.where == str(tmp_path)
