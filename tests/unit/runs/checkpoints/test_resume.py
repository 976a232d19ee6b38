"""Resuming: what the two runs must have in common, what is refused, and that it is
the same run.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, run
from dstrain.runs.checkpoints.resume import load_training_state, training_state
from dstrain.runs.checkpoints.state import load_state, save_state, states
from dstrain.training import batching
from safetensors.torch import save_file

from tests.support.family import Dit
from tests.support.runs import (
    PowerCut,
    config,
    files,
    log,
    outcome,
    project,
    same,
    stop_at,
    train,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def test_resume_without_a_run_starts_one(here: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path / "empty"):
        train(here, output_path=folder, max_steps=2, save_steps=1, resume="auto")
        assert [row["step"] for row in log(folder)] == [1, 2]
        assert len(states(folder)) == 2
        (tmp_path / "empty").mkdir(exist_ok=True)


def test_resume_starts_a_run_anew_that_ended_before_its_first_save(
    here: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(PowerCut):
        train(here, stop_at(2), output_path=out, max_steps=4)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StateError, match="start over with --overwrite"):
        train(here, output_path=out, max_steps=4)
    train(here, output_path=out, max_steps=4, resume="auto")
    train(here, output_path=tmp_path / "whole", max_steps=4)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert same(outcome(out), outcome(tmp_path / "whole"))


def test_resume_does_not_start_a_run_anew_whose_states_are_gone(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    shutil.rmtree(tmp_path / "states")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StateError, match="no checkpoint, although") as caught:
        train(here, output_path=tmp_path, max_steps=2, resume="auto")
    assert "start over with --overwrite" in caught.value.help_lines[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing", "nothing: is not a state folder"),
        ("out", "out: is not a state folder\n  --resume takes auto, or"),
        ("out/step-2.safetensors", "is not a state folder"),
        ("empty", "is not a state folder\n  --resume takes auto, or"),
    ],
)
def test_a_path_that_is_no_state_is_refused_saying_what_it_is(
    path: str, words: str, here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path / "out", max_steps=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError) as caught:
        train(
            here, output_path=tmp_path / "new", resume=str(tmp_path / path), max_steps=2
        )
    assert words.format(tmp_path) in str(caught.value)
    assert not files(tmp_path / "new")


def test_a_damaged_state_is_passed_over_for_the_one_before(
    here: Path, tmp_path: Path
) -> None:
    flags = {"max_steps": 6, "save_steps": 2}
    train(here, output_path=tmp_path / "whole", **flags)
    with pytest.raises(PowerCut):
        train(here, stop_at(5), output_path=tmp_path / "cut", **flags)
    damaged = tmp_path / "cut/states/step-4/optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    train(here, output_path=tmp_path / "cut", resume="auto", **flags)
    assert same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))
    with pytest.raises(StateError, match="sha256 of optimizer"):
        damaged.write_bytes(b"")
        train(here, output_path=tmp_path / "cut", resume=str(damaged.parent), **flags)


def test_a_state_can_be_named_and_what_came_after_it_is_done_again(
    here: Path, tmp_path: Path
) -> None:
    flags = {"max_steps": 6, "save_steps": 2}
    out = train(here, output_path=tmp_path / "out", **flags)
    before = outcome(out)
    with pytest.raises(StateError, match="contains step-6, which does not come from"):
        train(here, output_path=out, resume=str(out / "states/step-4"), **flags)
    assert same(before, outcome(out))
    (out / "states/step-6").rename(tmp_path / "later")
    train(here, output_path=out, resume=str(out / "states/step-4"), **flags)
    assert same(before, outcome(out))


def test_a_state_of_another_folder_is_not_mixed_into_a_run(
    here: Path, tmp_path: Path
) -> None:
    first = train(here, output_path=tmp_path / "first", max_steps=2, save_steps=1)
    other = train(here, output_path=tmp_path / "other", max_steps=3, save_steps=3)
    with pytest.raises(StateError, match="contains step-3"):
        train(
            here,
            output_path=other,
            resume=str(first / "states/step-1"),
            max_steps=4,
            save_steps=1,
        )
    train(
        here,
        output_path=tmp_path / "new",
        resume=str(first / "states/step-1"),
        max_steps=2,
        save_steps=1,
    )
    assert same(
        files(tmp_path / "new")["step-2.safetensors"],
        files(first)["step-2.safetensors"],
    )


def test_weights_of_other_shapes_is_not_resumed(tmp_path: Path) -> None:
    project(tmp_path)
    train(tmp_path, output_path=tmp_path / "out", max_steps=2)
    for path in (tmp_path / "model/transformer").iterdir():
        path.unlink()
    config_file = tmp_path / "model/transformer/config.json"
    with torch.random.fork_rng(devices=[]):
        save_file(
            Dit(1, 2).state_dict(), tmp_path / "model/transformer/model.safetensors"
        )
    config_file.write_text(json.dumps({"width": 1, "depth": 2}))
    with pytest.raises(
        StateError,
        match=r"of another shape\n.*lora_A.*saved .2, 8., this run .2, 1.",
    ) as caught:
        train(tmp_path, output_path=tmp_path / "out", max_steps=4, resume="auto")
    assert caught.value.where == "--resume"


def test_where_things_lie_and_how_fast_they_go_may_change(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path / "whole", max_steps=4, batch_size=2)
    train(here, output_path=tmp_path / "cut", max_steps=2, batch_size=2)
    run(config(here, task="sft:data_process", feature_cache=tmp_path / "cache"))
    changes = {"task": "sft:train", "feature_cache": tmp_path / "cache", "use_gradient_checkpointing": True,
               "batch_size": 2, "dataset_num_workers": 1}  # fmt: skip
    train(here, output_path=tmp_path / "cut", max_steps=4, resume="auto", **changes)
    whole, cut = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    assert same(whole["state"]["trainable"], cut["state"]["trainable"])
    assert same(whole["log"], cut["log"])


def test_statistics_that_a_trained_network_keeps_are_part_of_the_state(
    here: Path,
) -> None:
    """As a batch norm does; a state from before they were saved still resumes."""
    first, second, third = (
        training_run(config(here, trainable_models="dit")) for _ in range(3)
    )
    for run_, start in ((first, 3.0), (second, 0.0), (third, 0.0)):
        dit = run_.module.pipeline.components["dit"]
        dit.register_buffer("mean", torch.full((2,), start))
        dit.register_buffer("scratch", torch.full((1,), start), persistent=False)
    state = training_state(first, {})
    load_training_state(second, state, {})
    kept = dict(second.module.pipeline.components["dit"].named_buffers())
    assert (kept["mean"].tolist(), kept["scratch"].item()) == ([3.0, 3.0], 0.0)
    trainable = {
        name: tensor for name, tensor in state.trainable.items() if name != "dit.mean"
    }
    load_training_state(third, replace(state, trainable=trainable), {})
    kept = dict(third.module.pipeline.components["dit"].named_buffers())
    assert kept["mean"].tolist() == [0.0, 0.0]


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
        train(
            *(here,), output_path=tmp_path, max_steps=steps, save_steps=1,
            ema_decay=decay, resume="auto",
        )  # fmt: skip

    go(1, None)
    go(2, 0.3)
    made = files(tmp_path)
    begun = load_state(states(tmp_path)[0])
    assert begun.average_facts["steps"] == "1"
    for name, average in begun.average.items():
        before = load_state(states(tmp_path)[1]).trainable[name]
        torch.testing.assert_close(average, 0.1 * before + 0.9 * begun.trainable[name])
    with pytest.raises(StateError) as caught:
        go(3, 0.4)
    assert caught.value.what == "--ema_decay: saved 0.3, this run 0.4"
    assert same(files(tmp_path), made)
    capsys.readouterr()
    go(3, None)
    assert "without --ema_decay 0.3, the average of the run ends here" in (
        capsys.readouterr().err
    )
    assert not load_state(states(tmp_path)[0]).average
    assert "step-3.ema.safetensors" not in files(tmp_path)


MODIFY = """
from dstrain.registry.hooks import hookimpl
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
    assert not same(
        files(whole)["step-2.safetensors"], files(plain)["step-2.safetensors"]
    )

    def refused(resume: Path, **changes: Any) -> str:
        with pytest.raises(StateError) as caught:
            train(here, output_path=resume, max_steps=3, resume="auto", **changes)
        (line,) = [one for one in caught.value.help_lines if "plugins" in one]
        return line

    code = "half (extra-half 1.0) (code "
    without = refused(out, disabled_plugins=("half",))
    assert without.startswith(f"plugins that change steps: saved {code}")
    assert without.endswith(", this run none")
    assert f"saved none, this run {code}" in refused(plain)
    (site / "half_steps.py").write_text(MODIFY.replace("0.5", "0.25"))
    del sys.modules["half_steps"]
    other = refused(out)
    assert other.count(code) == 2
    train(
        here, output_path=plain, max_steps=3, resume="auto", disabled_plugins=("half",)
    )


def test_the_middle_of_an_epoch_is_reached_without_the_draws_before_it(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "CHUNK", 4)
    flags: dict[str, Any] = {"dataset_repeat": 5, "save_steps": 21}
    flags["max_steps"] = 26
    train(here, output_path=tmp_path / "whole", **flags)
    with pytest.raises(PowerCut):
        # The loader is ahead of the step that is saved.
        train(
            here,
            stop_at(24),
            output_path=tmp_path / "cut",
            dataset_num_workers=1,
            **flags,
        )
    shutil.copytree(tmp_path / "cut", tmp_path / "walked")
    saved = load_state(states(tmp_path / "cut")[0])
    assert (saved.step, saved.position["draws"]) == (21, 20)

    started = []
    permute = batching.permute

    def noting(positions: batching.Indices, *given: Any) -> batching.Indices:
        started.append(int(positions[0]))
        return permute(positions, *given)

    monkeypatch.setattr(batching, "permute", noting)
    train(here, output_path=tmp_path / "cut", resume="auto", **flags)
    assert min(started) == 20
    # As every state from before there were positions.
    walked = states(tmp_path / "walked")[0]
    save_state(walked, replace(saved, position={}))
    train(here, output_path=tmp_path / "walked", resume="auto", **flags)
    assert min(started) == 0
    expected = outcome(tmp_path / "whole")
    assert same(outcome(tmp_path / "cut"), expected)
    assert same(outcome(tmp_path / "walked"), expected)
