"""Resuming: what is refused, and that it is the same run."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Batch, StateError, TrainingModule
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.state import load_state, save_state
from safetensors.torch import save_file
from torch import Tensor

from tests.support.family import Dit
from tests.support.runs import PowerCut, files, outcome, project, same, stop_at, train

pytestmark = pytest.mark.usefixtures("tiny")


def test_resume_starts_a_run_without_saves_anew(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(PowerCut):
        train(here, stop_at(2), output_path=out, max_steps=4)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StateError) as caught:
        train(here, output_path=out, max_steps=4)
    assert "--overwrite" in caught.value.help_lines[0]
    train(here, output_path=out, max_steps=4, resume="auto")
    train(here, output_path=tmp_path / "whole", max_steps=4)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert same(outcome(out), outcome(tmp_path / "whole"))


@pytest.mark.parametrize("path", ["nothing", "out", "out/step-2.safetensors", "empty"])
def test_a_path_of_no_state_is_refused(path: str, here: Path, tmp_path: Path) -> None:
    train(here, output_path=tmp_path / "out", max_steps=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError) as caught:
        train(here, output_path=tmp_path / "new", resume=str(tmp_path / path))
    assert caught.value.where == str(tmp_path / path)
    assert "--resume" in caught.value.help_lines[0]
    assert not files(tmp_path / "new")


def test_a_damaged_state_is_passed_over(here: Path, tmp_path: Path) -> None:
    flags = {"max_steps": 6, "save_steps": 2}
    train(here, output_path=tmp_path / "whole", **flags)
    with pytest.raises(PowerCut):
        train(here, stop_at(5), output_path=tmp_path / "cut", **flags)
    damaged = tmp_path / "cut/states/step-4/optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    train(here, output_path=tmp_path / "cut", resume="auto", **flags)
    assert same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))
    damaged.write_bytes(b"")
    with pytest.raises(StateError, match=r"optimizer\.safetensors"):
        train(here, output_path=tmp_path / "cut", resume=str(damaged.parent), **flags)


def test_weights_of_other_shapes_are_not_resumed(tmp_path: Path) -> None:
    project(tmp_path)
    train(tmp_path, output_path=tmp_path / "out", max_steps=2)
    place = tmp_path / "model/transformer"
    for path in place.iterdir():
        path.unlink()
    with torch.random.fork_rng(devices=[]):
        save_file(Dit(1, 2).state_dict(), place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"width": 1, "depth": 2}))
    with pytest.raises(StateError, match=r"other shapes: .*lora_A") as caught:
        train(tmp_path, output_path=tmp_path / "out", max_steps=4, resume="auto")
    assert caught.value.where == "--resume"


def test_places_and_speed_may_change(here: Path, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"batch_size": 2}
    train(here, output_path=tmp_path / "whole", max_steps=4, **flags)
    train(here, output_path=tmp_path / "cut", max_steps=2, **flags)
    flags |= {"feature_cache": tmp_path / "cache", "output_path": tmp_path / "cut"}
    train(here, task="sft:data_process", **flags)
    flags |= {"use_gradient_checkpointing": True, "dataset_num_workers": 1}
    train(here, task="sft:train", max_steps=4, resume="auto", **flags)
    whole, cut = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    assert same(whole["state"]["trainable"], cut["state"]["trainable"])
    assert same(whole["log"], cut["log"])


class Counting(TrainingModule):
    """A module whose network counts its steps in a buffer, as a batch norm does."""

    starts: list[tuple[float, float]]

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.network = self.pipeline.components["dit"]
        self.network.register_buffer("steps", torch.zeros(()))
        self.network.register_buffer("scratch", torch.zeros(()), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        for buffer in (self.network.steps, self.network.scratch):
            buffer += 1
        self.starts.append((self.network.steps.item(), self.network.scratch.item()))
        return super().forward(batch)


def test_statistics_that_a_trained_network_keeps_are_part_of_the_state(
    here: Path, tmp_path: Path
) -> None:
    Counting.starts = []
    flags = {"output_path": tmp_path, "trainable_models": "dit", "resume": "auto"}
    train(here, Counting, max_steps=2, **flags)
    train(here, Counting, max_steps=3, **flags)
    assert Counting.starts == [(1, 1), (2, 2), (3, 1)]
    saved = load_state(states(tmp_path)[0])
    assert saved.trainable["dit.steps"] == 3
    # A state from before they were saved.
    older = {name: one for name, one in saved.trainable.items() if name != "dit.steps"}
    save_state(states(tmp_path)[0], replace(saved, trainable=older))
    train(here, Counting, max_steps=4, **flags)
    assert Counting.starts[-1] == (1, 1)


def test_the_average_over_the_steps_resumes_exactly(here: Path, tmp_path: Path) -> None:
    flags = {"max_steps": 6, "save_steps": 2, "ema_decay": 0.3}
    train(here, output_path=tmp_path / "whole", **flags)
    with pytest.raises(PowerCut):
        train(here, stop_at(5), output_path=tmp_path / "cut", **flags)
    train(here, output_path=tmp_path / "cut", resume="auto", **flags)
    whole = outcome(tmp_path / "whole")
    assert "step-6.ema.safetensors" in whole["files"]
    assert whole["state"]["average_facts"] == {"decay": "0.3", "steps": "6"}
    assert same(whole, outcome(tmp_path / "cut"))


def test_another_decay_is_refused_and_an_average_may_begin_or_end_at_a_resume(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go(steps: int, decay: float | None) -> None:
        flags = {"output_path": tmp_path, "save_steps": 1, "resume": "auto"}
        train(here, max_steps=steps, ema_decay=decay, **flags)

    go(1, None)
    go(2, 0.3)
    made = files(tmp_path)
    begun, before = (load_state(folder) for folder in states(tmp_path))
    assert begun.average_facts["steps"] == "1"
    for name, average in begun.average.items():
        wanted = 0.1 * before.trainable[name] + 0.9 * begun.trainable[name]
        torch.testing.assert_close(average, wanted)
    with pytest.raises(StateError, match=r"--ema_decay: .*0\.3, .*0\.4"):
        go(3, 0.4)
    assert same(files(tmp_path), made)
    capsys.readouterr()
    go(3, None)
    assert "--ema_decay 0.3" in capsys.readouterr().err
    assert not load_state(states(tmp_path)[0]).average
    assert "step-3.ema.safetensors" not in files(tmp_path)


MODIFY = """
from dstrain.registry.hooks import hookimpl
api = 2
@hookimpl
def dstrain_modify_step(step, model, optimizer):
    for parameter in model.trained_parameters:
        parameter.mul_(0.5)
"""


def test_a_run_whose_steps_a_plugin_changes_resumes_with_that_code_of_it_alone(
    here: Path, tmp_path: Path, fake_plugin: Callable[..., Path]
) -> None:
    plain, whole, out = (tmp_path / name for name in ("plain", "whole", "out"))
    train(here, output_path=plain, max_steps=2)
    names = {"half": "half_steps"}
    site = fake_plugin("extra-half", names, {"half_steps": MODIFY}, group="dstrain")
    train(here, output_path=whole, max_steps=2, save_steps=1)
    train(here, output_path=out, max_steps=1, save_steps=1)
    train(here, output_path=out, max_steps=2, save_steps=1, resume="auto")
    assert same(outcome(out), outcome(whole))
    name = "step-2.safetensors"
    assert not same(files(whole)[name], files(plain)[name])
    without = {"disabled_plugins": ("half",)}

    def named(resume: Path, **changes: Any) -> list[bool]:
        """Whether the refusal names the plugin as saved, and as that of this run."""
        with pytest.raises(StateError) as caught:
            train(here, output_path=resume, max_steps=3, resume="auto", **changes)
        lines = caught.value.help_lines[:2]
        return ["half (extra-half 1.0)" in line for line in lines]

    assert named(out, **without) == [True, False]
    assert named(plain) == [False, True]
    (site / "half_steps.py").write_text(MODIFY.replace("0.5", "0.25"))
    del sys.modules["half_steps"]
    assert named(out) == [True, True]
    train(here, output_path=plain, max_steps=3, resume="auto", **without)


def test_the_middle_of_an_epoch_is_reached_with_and_without_its_position(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.training.batching.CHUNK", 4)
    flags: dict[str, Any] = {"dataset_repeat": 5, "save_steps": 21, "max_steps": 26}
    train(here, output_path=tmp_path / "whole", **flags)
    cut, walked = tmp_path / "cut", tmp_path / "walked"
    with pytest.raises(PowerCut):
        # The loader is ahead of the step that is saved.
        train(here, stop_at(24), output_path=cut, dataset_num_workers=1, **flags)
    shutil.copytree(cut, walked)
    saved = load_state(states(cut)[0])
    assert (saved.step, saved.position["draws"]) == (21, 20)
    # As every state from before there were positions.
    save_state(states(walked)[0], replace(saved, position={}))
    for folder in (cut, walked):
        train(here, output_path=folder, resume="auto", **flags)
        assert same(outcome(folder), outcome(tmp_path / "whole"))
