"""Trackers get what is logged and previews, at their steps; none of them changes a run or
ends it.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from dstrain import Frames, UsageError
from dstrain_watch.trackers import TRACKERS
from torch import Tensor

from tests.support import family
from tests.support.runs import changed, files, log, same, train

pytestmark = pytest.mark.usefixtures("tiny")

SWANLAB = """
from types import SimpleNamespace
CALLS = []
class Settings(SimpleNamespace):
    pass
class Image:
    def __init__(self, picture):
        self.size, self.shade = picture.size, picture.getpixel((0, 0))[0]
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

AIM = """
SENT = {}
class Image:
    def __init__(self, picture, caption):
        self.size = picture.size
class Run(dict):
    def __init__(self, repo):
        self.close = dict
    def track(self, value, name, step):
        SENT[name, step] = getattr(value, "size", value)
"""


@pytest.fixture
def swanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for swanlab with those parts of its interface that are used."""
    (tmp_path / "library/swanlab").mkdir(parents=True)
    (tmp_path / "library/swanlab/__init__.py").write_text(SWANLAB)
    monkeypatch.syspath_prepend(tmp_path / "library")
    import swanlab

    yield swanlab
    del sys.modules["swanlab"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Weights & Biases send nothing, and end the process that it starts."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def events(folder: Path) -> Any:
    """What TensorBoard shows of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = (folder / "logs/tensorboard").iterdir()
    shown = EventAccumulator(str(place))
    shown.Reload()
    return shown


def warnings_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("dstrain: warning: ")]


@pytest.mark.parametrize(
    "flags", [{"report_to": "tensorboard,swanlab"}, {"enable_swanlab_log": True}]
)
def test_a_library_that_is_absent_is_refused_with_the_way_to_install_it(
    flags: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="pip install swanlab") as caught:
        train(here, output_path=tmp_path, **flags)
    assert caught.value.where == "--report_to"
    # Stage 1 logs to none.
    train(here, task="sft:data_process", feature_cache=tmp_path / "cache", **flags)


def test_a_run_is_the_same_with_trackers_which_get_its_rows_and_previews(
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["dstrain", "a-typed-word"])
    monkeypatch.setenv("HF_TOKEN", "hf_a-token-of-a-hub")
    given: dict[str, Any] = {"preview_prompt": ("a dog",), "preview_steps": 2}
    given["preview_at_start"] = True
    given["validation_split"] = 0.3
    plain = train(here, output_path=tmp_path / "a", max_steps=3, save_steps=3, **given)
    tracked = {**given, "report_to": "tensorboard,wandb", "save_steps": 2}
    tracked["wandb_project"] = "dogs"
    projects: set[str] = set()
    module = changed(lambda _: projects.add(sys.modules["wandb"].run.project))
    for start in ({"max_steps": 3}, {"max_steps": 3, "resume": "auto"}):
        other = train(here, module, output_path=tmp_path / "b", **tracked, **start)
        # What was logged after the state that is resumed is not shown.
        shutil.rmtree(other / "states/step-3")
    assert warnings_of(capsys) == [] and projects == {"dogs"}
    assert log(plain) == log(other)
    assert same(files(plain)["step-3.safetensors"], files(other)["step-3.safetensors"])
    shown = events(other)
    rows = (other / "logs/loss.jsonl").read_text().splitlines()
    for name in json.loads(rows[0]).keys() - {"step"}:
        scalars = shown.Scalars(name)
        assert [one.step for one in scalars] == [1, 2, 3]
        logged = [json.loads(row)[name] for row in rows]
        np.testing.assert_allclose([one.value for one in scalars], logged, rtol=1e-5)
    assert [one.step for one in shown.Scalars("validation_loss_q4")] == [0, 2, 3]
    assert [one.step for one in shown.Images("preview/0")] == [0, 2]
    text = shown.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]
    assert '"preview_steps": 2' in text.decode()
    run_id = json.loads((other / "logs/trackers.json").read_bytes())["id"]
    offline_runs = sorted((other / "logs/wandb").rglob("*.wandb"))
    assert [path.stem for path in offline_runs] == [f"run-{run_id}"] * 2
    # The run's own state, which nobody is sent, has the command.
    (other / "logs/state.json").unlink()
    kept = [path.read_bytes() for path in (other / "logs").rglob("*") if path.is_file()]
    secret = (b"a-typed-word", b"a-token")
    assert not any(word in one for word in secret for one in kept)
    # A run that replaces it is another one, and leaves the trackers' folders alone.
    again = {"max_steps": 1, "overwrite": True, "report_to": "tensorboard"}
    train(here, output_path=other, **again)
    assert len(list((other / "logs/tensorboard").iterdir())) == 2
    assert json.loads((other / "logs/trackers.json").read_bytes())["id"] != run_id


class DecodedVideo(TypedDict):
    video: Frames


def decode_video(latents: Tensor, *, vae: Any) -> DecodedVideo:
    pixels = torch.arange(9, dtype=torch.uint8)[:, None, None, None]
    pixels = pixels.expand(9, 16, 32, 3).contiguous()
    return {"video": Frames(pixels, 8.0)}


def test_swanlab_gets_the_same_run_again_and_neither_the_command_nor_what_is_printed(
    here: Path, tmp_path: Path, swanlab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(family.BASE, decoders=(decode_video,))
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    flags = {"report_to": "swanlab", "swanlab_project": "dogs", "output_path": tmp_path}
    shown = {"preview_prompt": ("a",), "preview_at_start": True}
    train(here, max_steps=1, **shown, **flags)
    train(here, max_steps=2, resume="auto", **flags)
    names = [call[0] for call in swanlab.CALLS]
    assert names == ["init", "config", *["log"] * 3, "finish",
                     "init", "config", "log", "finish"]  # fmt: skip
    init, sent, first, numbers, second = swanlab.CALLS[:5]
    assert swanlab.CALLS[6][1]["id"] == init[1]["id"] and len(init[1]["id"]) == 21
    assert init[1]["project"] == "dogs" and init[1]["resume"] == "allow"
    assert Path(init[1]["logdir"]) == tmp_path / "logs/swanlab"
    assert vars(init[1]["settings"]) == {
        "metadata_collect": False,
        "requirements_collect": False,
        "log_proxy_type": "none",
    }
    assert (sent[1]["model"], sent[1]["learning_rate"]) == ("tiny", 0.01)
    assert numbers[2] == 1 and "loss" in numbers[1] and "step" not in numbers[1]
    assert [first[2], second[2]] == [0, 1]
    # Of a video, four of its frames.
    shown = first[1]["preview/0"]
    assert [(one.size, one.shade) for one in shown] == [
        ((32, 16), shade) for shade in (0, 3, 5, 8)
    ]


def test_aim_gets_each_picture_under_a_name_of_its_own(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(family.BASE, decoders=(decode_video,))
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    (tmp_path / "library/aim").mkdir(parents=True)
    (tmp_path / "library/aim/__init__.py").write_text(AIM)
    monkeypatch.syspath_prepend(tmp_path / "library")
    flags = {"preview_prompt": ("a",), "preview_at_start": True, "max_steps": 1}
    train(here, output_path=tmp_path / "out", report_to="aim", **flags)
    sent = sys.modules.pop("aim").SENT
    assert [sent[f"preview/0/{number}", 0] for number in range(4)] == [(32, 16)] * 4
    assert ("loss", 1) in sent


def test_all_trackers_of_accelerate_are_known() -> None:
    assert {*TRACKERS} == {*LOGGER_TYPE_TO_CLASS}


class Grouped:
    """Settings of a later swanlab."""

    class Probe:
        model_fields = ("runtime", "git", "monitor", "monitor_interval")

    own: tuple[str, object] = ("git", False)

    def __init__(self, probe: dict[str, bool], terminal: dict[str, str]) -> None:
        self.probe = SimpleNamespace(**{**probe, **dict([self.own])})
        self.terminal = SimpleNamespace(**{**terminal, **dict([self.own])})


class Deaf:
    """Settings of a swanlab that does not take them."""

    def __init__(self, **given: object) -> None:
        pass


def test_a_swanlab_that_groups_its_settings_collects_nothing_either(
    here: Path, tmp_path: Path, swanlab: Any
) -> None:
    swanlab.Settings = Grouped
    train(here, output_path=tmp_path, report_to="swanlab", max_steps=1)
    assert swanlab.CALLS[0][1]["project"] == "dstrain"
    settings = swanlab.CALLS[0][1]["settings"]
    assert vars(settings.probe) == {"runtime": False, "git": False, "monitor": False}
    assert settings.terminal.proxy_type == "none"


@pytest.mark.parametrize("own", [None, ("git", True), ("proxy_type", "all")])
def test_a_swanlab_that_does_not_take_the_settings_gets_nothing(
    own: tuple[str, object] | None,
    here: Path,
    tmp_path: Path,
    swanlab: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    swanlab.Settings = type("Settings", (Grouped,), {"own": own}) if own else Deaf
    train(here, output_path=tmp_path, report_to="swanlab", max_steps=1)
    assert swanlab.CALLS == []
    (warning,) = warnings_of(capsys)
    assert "swanlab" in warning


def test_a_tracker_whose_question_for_a_login_has_no_answer_is_given_up(
    here: Path, tmp_path: Path, swanlab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, abort = KeyboardInterrupt(), RuntimeError()
    ended.__context__, abort.__context__ = abort, EOFError()
    swanlab.init = Mock(side_effect=ended)
    train(here, output_path=tmp_path, report_to="swanlab", max_steps=1)
    assert "swanlab: EOFError: no login: log in first" in warnings_of(capsys)[0]


@pytest.mark.parametrize("fault", [ConnectionError, SystemExit])
@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_given_up_with_one_warning(
    failing: str,
    fault: type[BaseException],
    here: Path,
    tmp_path: Path,
    swanlab: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise fault("https://ann:s3cr3t@example.com is gone\nand more")

    setattr(swanlab if failing == "init" else swanlab.Run, failing, fail)
    flags = {"report_to": "swanlab,tensorboard", "max_steps": 2}
    train(here, output_path=tmp_path, **flags)
    (warning,) = warnings_of(capsys)
    assert f"swanlab: {fault.__name__}: https://" in warning
    assert "s3cr3t" not in warning
    assert len(events(tmp_path).Scalars("loss")) == 2
