"""Observers see steps and saves, ask to stop or save, and keep a state."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import Diverged, run
from dstrain.cli.main import main

from tests.support.processes import in_processes, words
from tests.support.runs import (
    PowerCut,
    config,
    files,
    flags_of,
    log,
    same,
    stop_at,
    train,
)

pytestmark = pytest.mark.usefixtures("tiny")
Install = Callable[..., Path]
NOTES = """
from dstrain.plugin import Observer, hookimpl
api = 2
SEEN = []
class Notes(Observer):
    total = 0.0
    def start(self, run):
        SEEN.append(("start", run.step, self.total))
    def step(self, run, numbers):
        self.total += numbers["loss"]
        SEEN.append(("step", run.step, sorted(run.asked)))
    def saved(self, run, files):
        SEEN.append(("saved", run.step, [one.name for one in files]))
    def reported(self, run, values):
        SEEN.append(("reported", run.step, sorted(values)))
    def end(self, run, how):
        SEEN.append(("end", run.step, how))
    def state(self):
        return {"total": self.total}
    def load(self, state):
        self.total = state["total"]
@hookimpl
def dstrain_observers(run):
    return [Notes()]
"""
ASKS = """
from dstrain.plugin import Observer, hookimpl
api = 2
class Asks(Observer):
    def step(self, run, numbers):
        for what in {at}.get(run.step, ()):
            run.ask(what)
@hookimpl
def dstrain_observers(run):
    return [Asks()]
"""


def installed(fake_plugin: Install, **sources: str) -> list[Any]:
    for name, source in sources.items():
        module = f"watching_{name}"
        sys.modules.pop(module, None)
        fake_plugin(f"extra-{name}", {name: module}, {module: source}, "dstrain")
    seen: list[Any] = __import__("watching_notes").SEEN
    return seen


def test_it_is_told_of_the_start_steps_saves_reports_and_the_end(
    fake_plugin: Install, here: Path, tmp_path: Path
) -> None:
    seen = installed(fake_plugin, notes=NOTES)
    losses = ["validation_loss", *(f"validation_loss_q{part}" for part in (1, 2, 3, 4))]
    flags = {"validation_split": 0.34, "max_steps": 2, "save_steps": 2}
    train(here, output_path=tmp_path, **flags)
    assert seen == [
        ("start", 0, 0.0),
        ("reported", 0, losses),
        ("step", 1, []),
        ("step", 2, []),
        ("saved", 2, ["step-2.safetensors"]),
        ("reported", 2, losses),
        ("end", 2, "finished"),
    ]


def test_what_it_reports_of_a_report_waits_for_the_next_step(
    fake_plugin: Install, here: Path, tmp_path: Path
) -> None:
    seen_alone = "sorted(values)))"
    echoed = f"{seen_alone}\n        run.report({{'echo': 1.0}})"
    seen = installed(fake_plugin, notes=NOTES.replace(seen_alone, echoed))
    train(here, output_path=tmp_path, validation_split=0.34, max_steps=2)
    echoes = [step for name, step, what in seen if what == ["echo"]]
    assert echoes == [1, 2, 2]  # the last one at the save


def test_callbacks_and_results_have_the_losses(here: Path, tmp_path: Path) -> None:
    flags = {"validation_split": 0.34, "max_steps": 4, "validation_steps": 2}
    seen: list[float | None] = []
    result = run(
        config(here, output_path=tmp_path, **flags),
        callbacks=[lambda numbers: seen.append(numbers.validation_loss)],
    )
    table = (tmp_path / "logs/validation.csv").read_text().splitlines()[1:]
    logged = [float(line.split(",")[1]) for line in table]
    computed = [one["validation_loss"] for one in result.validation.values()]
    assert list(result.validation) == [0, 2, 4]
    assert computed == pytest.approx(logged, rel=1e-5)
    # A step's own loss is computed after the callbacks.
    assert seen == [computed[0], computed[0], computed[1], computed[1]]


def test_what_it_asks_for_is_done_and_others_read_it(
    fake_plugin: Install, here: Path, tmp_path: Path
) -> None:
    plain = train(here, output_path=tmp_path / "plain", max_steps=6)
    asked = {1: ["save"], 2: ["picture"], 3: ["stop"]}
    asks = ASKS.format(at=asked)
    seen = installed(fake_plugin, notes=NOTES, asks=asks)
    out = tmp_path / "out"
    result = run(config(here, output_path=out, max_steps=6))
    assert result.step == 3
    assert sorted(files(out)) == ["step-1.safetensors", "step-3.safetensors"]
    assert [one for one in seen if one[0] == "step"] == [
        ("step", 1, []),
        ("step", 2, ["save"]),
        ("step", 3, ["picture"]),
    ]
    assert seen[-1] == ("end", 3, "stopped")
    assert json.loads((out / "logs/state.json").read_text())["ended"] == "stopped"
    again = train(here, output_path=out, max_steps=6, resume="auto")
    assert same(
        files(again)["epoch-0.safetensors"], files(plain)["epoch-0.safetensors"]
    )


def test_processes_agree_on_what_one_of_them_asks_for(
    fake_plugin: Install, here: Path, tmp_path: Path
) -> None:
    installed(fake_plugin, notes=NOTES, asks=ASKS.format(at={2: ["stop"]}))

    def work(rank: int) -> None:
        result = run(config(here, output_path=tmp_path / "out", max_steps=4))
        assert result.step == 2

    ended = in_processes(2, work, tmp_path)
    assert ended.codes == (0, 0), ended.said
    assert list(files(tmp_path / "out")) == ["step-2.safetensors"]


def test_one_that_fails_where_others_may_wait_for_it_ends_the_run_by_its_name(
    fake_plugin: Install, here: Path, tmp_path: Path
) -> None:
    fails = NOTES.replace("total = 0.0", "total, everywhere = 0.0, True")
    fails = fails.replace("self.total += numbers", "1 / int(run.is_main); numbers")
    installed(fake_plugin, notes=fails)

    def work(rank: int) -> int:
        return main(words(flags_of(here, output_path=tmp_path / "out", max_steps=2)))

    ended = in_processes(2, work, tmp_path)
    assert ended.codes[1] == 2 and ended.codes[0] != 0
    assert "extra-notes" in ended.said[1] and "Notes.step" in ended.said[1]


def test_its_state_is_in_a_checkpoint_and_a_resumed_run_gets_it_back(
    fake_plugin: Install, here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path / "plain", max_steps=2)
    seen = installed(fake_plugin, notes=NOTES)
    flags = {"output_path": tmp_path / "out", "max_steps": 4, "save_steps": 2}
    with pytest.raises(PowerCut):
        train(here, stop_at(3), **flags)
    assert seen[-1][2] == "failed"
    train(here, resume="auto", **flags)
    start = [one for one in seen if one[0] == "start"][-1]
    total = sum(row["loss"] for row in log(tmp_path / "out")[:2])
    assert start == ("start", 2, pytest.approx(total))
    state = "states/step-2/state.json"
    assert "observers" not in json.loads((tmp_path / "plain" / state).read_text())


def test_a_runs_file_says_where_it_is_and_ended(here: Path, tmp_path: Path) -> None:
    path = tmp_path / "logs/state.json"
    seen: list[dict[str, Any]] = []
    given = config(here, output_path=tmp_path, max_steps=2)
    run(given, callbacks=[lambda numbers: seen.append(json.loads(path.read_text()))])
    first = seen[0]
    assert (first["step"], first["total_steps"], first["stage"]) == (0, 2, "unsplit")
    assert first["process"] == os.getpid() and first["host"] and first["command"]
    assert first["started"] > 0 and "ended" not in first
    last = json.loads(path.read_text())
    assert (last["step"], last["ended"], last["message"]) == (2, "finished", "")
    assert last["samples_per_second"] > 0

    def fail(numbers: Any) -> None:
        raise Diverged("step 1", "no more")

    with pytest.raises(Diverged):
        run(config(here, output_path=tmp_path / "two", max_steps=2), callbacks=[fail])
    last = json.loads((tmp_path / "two/logs/state.json").read_text())
    assert (last["step"], last["ended"]) == (1, "failed")
    assert "no more" in last["message"]
