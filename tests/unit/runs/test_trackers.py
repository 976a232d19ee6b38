"""Trackers get what is logged and previews, at their steps, from the main process; none of
them changes a run or ends it.
"""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import Frames, TrainConfig, UsageError, run
from dstrain.runs.reports.metrics import COLUMNS
from dstrain.runs.trackers import Trackers, check_trackers
from PIL import Image

from tests.support.command_lines import toy_config
from tests.support.runs import config, files, log, project

SWANLAB = """
from types import SimpleNamespace
CALLS = []
class Settings:
    def __init__(self, **given):
        self.__dict__ = {} if CALLS == ["deaf"] else given
class Image:
    def __init__(self, picture):
        self.size = picture.size
class Config(dict):
    def update(self, values, allow_val_change):
        CALLS.append(("config", values))
config = Config()
class Run:
    def log(self, values, step):
        CALLS.append(("log", values, step))
    def finish(self):
        CALLS.append(("finish",))
def init(**given):
    CALLS.append(("init", given))
    return Run()
"""


@pytest.fixture
def swanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for swanlab with those parts of its interface that are used."""
    (tmp_path / "library/swanlab").mkdir(parents=True)
    (tmp_path / "library/swanlab/__init__.py").write_text(SWANLAB)
    monkeypatch.syspath_prepend(tmp_path / "library")
    import swanlab

    yield swanlab
    del sys.modules["swanlab"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def opened_in(folder: Path, **asked: Any) -> Trackers:
    """Trackers for a folder that has the record of a run."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "logs/config.json").write_text('{"model": "tiny", "seed": 3}')
    return Trackers(toy_config(**asked))


def events(folder: Path) -> Any:
    """What TensorBoard shows of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = (folder / "logs/tensorboard").iterdir()
    shown = EventAccumulator(str(place))
    shown.Reload()
    return shown


def test_a_library_that_is_absent_is_refused_with_the_way_to_install_it(
    tiny: None, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        check_trackers(toy_config(report_to="tensorboard,swanlab"))
    assert str(caught.value) == (
        "dstrain: error: --report_to: swanlab is not installed\n  run: pip install swanlab"
    )
    with pytest.raises(UsageError, match="swanlab is not installed"):
        run(config(tmp_path, enable_swanlab_log=True, toy=True))
    check_trackers(toy_config(report_to="tensorboard,wandb"))


def test_tensorboard_shows_numbers_pictures_and_the_configuration(
    tmp_path: Path,
) -> None:
    trackers = opened_in(tmp_path, report_to="tensorboard")
    frames = Frames(torch.zeros(9, 4, 6, 3, dtype=torch.uint8), 8.0)
    with trackers.opened(tmp_path, 0):
        trackers.log({"loss": 0.5}, 1)
        trackers.log({"loss": 0.25, "validation_loss": 2.0}, 2)
        image = Image.new("RGB", (4, 4), (0, 255, 0))
        trackers.log_images({"preview/0": image, "preview/1": frames}, 2)
    shown = events(tmp_path)
    assert [(one.step, one.value) for one in shown.Scalars("loss")] == [
        (1, 0.5),
        (2, 0.25),
    ]
    assert [one.step for one in shown.Scalars("validation_loss")] == [2]
    assert {"preview/0", "preview/1"} <= set(shown.Tags()["images"])
    (text,) = shown.Tensors("configuration/text_summary")
    assert '"seed": 3' in text.tensor_proto.string_val[0].decode()


def test_a_resumed_run_goes_on_in_the_same_place_at_its_step(tmp_path: Path) -> None:
    trackers = opened_in(tmp_path, report_to="tensorboard")
    for first, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with trackers.opened(tmp_path, first):
            for step in steps:
                trackers.log({"loss": float(step + first)}, step)
    shown = [(one.step, one.value) for one in events(tmp_path).Scalars("loss")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0)]


def test_swanlab_gets_the_same_run_again_and_neither_the_command_nor_what_is_printed(
    tmp_path: Path, swanlab: Any
) -> None:
    trackers = opened_in(tmp_path, report_to="swanlab", swanlab_project="dogs")
    for step in (0, 1):
        with trackers.opened(tmp_path, step):
            trackers.log({"loss": 0.5}, step + 1)
            trackers.log_images({"preview/0": Image.new("L", (4, 6))}, step + 1)
    names = [call[0] for call in swanlab.CALLS]
    assert names == ["init", "config", "log", "log", "finish"] * 2
    init, sent, numbers, pictures, _ = swanlab.CALLS[:5]
    assert swanlab.CALLS[5][1]["id"] == init[1]["id"] and len(init[1]["id"]) == 21
    assert init[1]["project"] == "dogs" and init[1]["resume"] == "allow"
    assert Path(init[1]["logdir"]) == tmp_path / "logs/swanlab"
    assert vars(init[1]["settings"]) == {
        "metadata_collect": False,
        "requirements_collect": False,
        "log_proxy_type": "none",
    }
    assert sent[1] == {"model": "tiny", "seed": 3}
    assert numbers[1:] == ({"loss": 0.5}, 1)
    assert pictures[1]["preview/0"][0].size == (4, 6)


def test_a_swanlab_that_groups_its_settings_collects_nothing_either(
    tmp_path: Path, swanlab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Settings:
        class Probe:
            model_fields = ("runtime", "git", "monitor", "monitor_interval")

        def __init__(self, probe: dict[str, bool], terminal: dict[str, str]) -> None:
            self.probe = SimpleNamespace(**probe)
            self.terminal = SimpleNamespace(**terminal)

    monkeypatch.setattr(swanlab, "Settings", Settings)
    with opened_in(tmp_path, report_to="swanlab").opened(tmp_path, 0):
        pass
    settings = swanlab.CALLS[0][1]["settings"]
    assert vars(settings.probe) == {"runtime": False, "git": False, "monitor": False}
    assert settings.terminal.proxy_type == "none"


def test_a_swanlab_that_does_not_take_the_settings_gets_nothing(
    tmp_path: Path, swanlab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    swanlab.CALLS.append("deaf")
    trackers = opened_in(tmp_path, report_to="swanlab")
    with trackers.opened(tmp_path, 0):
        trackers.log({"loss": 0.5}, 1)
    assert swanlab.CALLS == ["deaf"]
    (record,) = caplog.records
    assert "has other settings" in record.message


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_given_up_with_one_warning(
    failing: str,
    tmp_path: Path,
    swanlab: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("https://ann:s3cr3t@example.com is gone\nand more")

    place = swanlab if failing == "init" else swanlab.Run
    monkeypatch.setattr(place, failing, fail)
    trackers = opened_in(tmp_path, report_to="swanlab,tensorboard")
    with trackers.opened(tmp_path, 0):
        trackers.log({"loss": 0.5}, 1)
        trackers.log({"loss": 0.25}, 2)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("nothing more is logged to swanlab: ConnectionErr")
    assert "s3cr3t" not in record.message and "more\n" not in record.message
    assert len(events(tmp_path).Scalars("loss")) == 2


def test_only_the_main_process_has_trackers(tmp_path: Path) -> None:
    trackers = Trackers(toy_config(report_to="tensorboard"), is_main=False)
    with trackers.opened(tmp_path, 0):
        trackers.log({"loss": 0.5}, 1)
    assert not list(tmp_path.iterdir())


Start = Callable[..., TrainConfig]


@pytest.mark.usefixtures("tiny")
def test_a_run_is_the_same_with_trackers_which_get_its_rows_and_previews(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = project(tmp_path / "project")
    monkeypatch.setattr(sys, "argv", ["dstrain", "a-typed-word"])
    monkeypatch.setenv("HF_TOKEN", "hf_a-token-of-a-hub")
    given: dict[str, Any] = {"preview_prompt": ("a dog",), "preview_steps": 3}
    run(config(place, max_steps=3, save_steps=3, **given))
    tracked = {**given, "report_to": "tensorboard,wandb"}
    other = tmp_path / "other"
    for start in ({"max_steps": 2}, {"max_steps": 3, "resume": "auto"}):
        run(config(place, output_path=other, save_steps=2, **tracked, **start))
    own = [one for one in caplog.records if one.name.startswith("dstrain")]
    assert not [one for one in own if one.levelno >= logging.WARNING]
    assert log(place / "out") == log(other)
    last = "step-3.safetensors"
    one, two = files(place / "out")[last], files(other)[last]
    assert all(torch.equal(one[name], two[name]) for name in one | two)
    shown = events(other)
    rows = log(other)
    for name in set(COLUMNS) - {"step"}:
        assert [one.step for one in shown.Scalars(name)] == [1, 2, 3]
    losses = [one.value for one in shown.Scalars("loss")]
    np.testing.assert_allclose(losses, [row["loss"] for row in rows], rtol=1e-5)
    assert [one.step for one in shown.Images("preview/0")] == [0, 3]
    run_id = json.loads((other / "logs/trackers.json").read_bytes())["id"]
    offline_runs = sorted((other / "logs/wandb").rglob("*.wandb"))
    assert [path.stem for path in offline_runs] == [f"run-{run_id}"] * 2
    kept = [path.read_bytes() for path in (other / "logs").rglob("*") if path.is_file()]
    assert not any(
        word in one for word in (b"a-typed-word", b"a-token") for one in kept
    )
    # A run that replaces it is another one, and leaves the trackers' folders alone.
    again = {"max_steps": 1, "overwrite": True, "report_to": "tensorboard"}
    run(config(place, output_path=other, **again))
    assert len(list((other / "logs/tensorboard").iterdir())) == 2
    assert json.loads((other / "logs/trackers.json").read_bytes())["id"] != run_id
