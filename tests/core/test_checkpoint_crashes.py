"""A process killed at any file-system event of a save or of pruning leaves a whole older or newer state."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import checkpoint, files
from dstrain.checkpoint import TrainingState, load_state, newest_state, prune_states, save_state, state_folder


def small(step: int) -> TrainingState:
    return TrainingState(step, {"w": torch.full((3,), float(step))}, {"state": {}}, {}, "old", {})


def killed_at(event: int, save: Callable[[], None]) -> bool:
    """Fork, save in the child and kill it at its n-th file-system event; return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        left = [event]

        def hook(name: str, _: Any) -> None:
            if name == "open" or name.startswith(("os.", "shutil.")):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("step", [1, 2], ids=["replacing a state", "beside a state"])
def test_every_crash_point_leaves_a_whole_older_or_newer_state(tmp_path: Path, step: int) -> None:
    new = replace(small(step), config_digest="new")
    found = set()
    for event in range(1, 200):
        output = tmp_path / str(event)
        save_state(state_folder(output, 1), small(1))
        killed = killed_at(event, lambda output=output: save_state(state_folder(output, step), new))
        state = load_state(newest_state(output))
        assert (state.step, state.config_digest) in {(1, "old"), (step, "new")}
        assert torch.equal(state.trainable["w"], torch.full((3,), float(state.step)))
        found.add(state.config_digest)
        files.remove_leftovers(output)
        save_state(state_folder(output, step), new)
        assert load_state(newest_state(output)).config_digest == "new"
        assert {path.name for path in output.iterdir()} == {"state-1", f"state-{step}"}
        if not killed:
            break
    assert event > 10
    assert found == {"old", "new"}


@pytest.mark.parametrize("keep", [1, 2])
def test_every_crash_point_of_pruning_leaves_whole_states(tmp_path: Path, keep: int) -> None:
    for event in range(1, 100):
        output = tmp_path / str(event)
        for step in (1, 2, 3):
            save_state(state_folder(output, step), small(step))
        killed = killed_at(event, lambda output=output: prune_states(output, keep))
        assert all(checkpoint.damage(folder) == "" for folder in checkpoint.states(output))
        assert newest_state(output).name == "state-3"
        if not killed:
            break
    assert event > 3
    assert len(checkpoint.states(output)) == keep
