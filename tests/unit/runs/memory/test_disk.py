"""What a run writes follows from its flags and its steps."""

from typing import Any

import pytest
from dstrain import TrainConfig
from dstrain.runs.memory.disk import disk_of


@pytest.mark.parametrize(
    ("flags", "steps", "saves", "states"),
    [
        ({"save_steps": 100}, 1000, 10, 3),
        ({"save_steps": 300}, 1000, 4, 3),
        ({"save_steps": 100, "keep_checkpoints": 1}, 1000, 2, 2),
        ({"save_steps": 100, "keep_checkpoints": 4}, 1000, 5, 5),
        ({}, 20, 2, 2),
        ({"save_steps": 10}, None, None, 3),
        ({"keep_checkpoints": 2}, None, 3, 3),
    ],
)
def test_saves_and_states_are_counted(
    flags: dict[str, Any], steps: int | None, saves: int | None, states: int
) -> None:
    config = TrainConfig(model="tiny", **flags)
    per_epoch = None if steps is None else 10
    disk = disk_of(config, 10, 30, steps, per_epoch, downloads=500)
    assert (disk.saves, disk.states) == (saves, states)
    most = None if saves is None else saves * 10 + states * 30 + 500
    assert disk.most == most
