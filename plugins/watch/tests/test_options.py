"""Options of previews and trackers: what they ask for, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, TrainConfig, UsageError, run
from dstrain.runs.resolve import resolve
from dstrain.storage import RunFiles
from dstrain_watch.options import WatchOptions
from dstrain_watch.previews import prompt_row

from tests.support.experts import copied_denoiser, let_tiny_have_experts
from tests.support.family import weights_of
from tests.support.runs import config as config_of, project, train


def config(**given: Any) -> TrainConfig:
    return TrainConfig(model="tiny", toy=True, output_path="out", **given)


def test_a_tracker_is_asked_for_by_either_flag_and_named_once() -> None:
    given = {"report_to": "wandb, tensorboard", "enable_wandb_log": True}
    options = config(**given, enable_swanlab_log=True).of(WatchOptions)
    assert options.trackers == ("wandb", "tensorboard", "swanlab")
    for name in ("wandb", "swanlab", "tensorboard"):
        asked = config(**{f"enable_{name}_log": True}).of(WatchOptions)
        assert asked.trackers == (name,)
    assert config(enable_csv_log=True).of(WatchOptions).trackers == ()


@pytest.mark.parametrize(
    ("given", "where", "named"),
    [
        ({"preview_steps": 2}, "--preview_steps", "--preview_prompt"),
        ({"preview_at_start": True}, "--preview_at_start", "--preview_prompt"),
        ({"report_to": "wandb,tensorbord"}, "--report_to", "'tensorboard'"),
        ({"report_to": " ,"}, "--report_to", ""),
        ({"wandb_project": "dogs", "report_to": "swanlab"}, "--wandb_project", "wandb"),
        ({"swanlab_project": "dogs"}, "--swanlab_project", "swanlab"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_what_cannot_be_meant_is_refused(
    given: dict[str, Any], where: str, named: str
) -> None:
    with pytest.raises(UsageError) as caught:
        config(**given).of(WatchOptions).check(config(**given))
    assert caught.value.where == where
    assert named in str(caught.value)


def test_a_prompt_may_have_arguments_of_its_own() -> None:
    text = "a dog, --best-- --w 64 --h 32 --d 42 --s 3 --l 2.5 --n blurry, dark"
    row = prompt_row(text)
    assert (row.option, row.text) == ("--preview_prompt", text)
    assert row.prompt == "a dog, --best--"
    assert row.arguments == {
        "width": 64,
        "height": 32,
        "seed": 42,
        "num_inference_steps": 3,
        "guidance_scale": 2.5,
        "negative_prompt": "blurry, dark",
    }
    assert prompt_row(" a dog ").prompt == " a dog "
    assert prompt_row("a -- dash in it").arguments == {}


@pytest.mark.parametrize(
    "text",
    [
        *("a --d red", "a --s 0", "a --l much", "a --w 0 --h 0", "a --d -5"),
        *(f"a --d {2**63}", "a --l nan", "a --l inf", "a --l -1"),
        *("a --g 3", "a --d 3 --steps 20", "a --s=20", "--d 3", "a --d"),
    ],
)
def test_an_argument_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        prompt_row(text)
    assert caught.value.where == "--preview_prompt"
    assert text in caught.value.what


def test_a_file_of_prompts_is_no_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prompt_row("kp.txt").prompt == "kp.txt"
    Path("kp.txt").write_text("a dog\n")
    with pytest.raises(UsageError, match=r"kp\.txt is a file; .* lines as a prompt"):
        prompt_row("kp.txt")


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_size_that_the_model_cannot_make_is_refused_before_training(
    is_dry: bool, here: Path, tmp_path: Path
) -> None:
    for size, name in (("--w 24 --h 21", "height"), ("--w 21 --d 42", "width")):
        flags: dict[str, Any] = {"preview_prompt": (f"dog {size}",), "dry_run": is_dry}
        with pytest.raises(UsageError, match=f"{name}: expected a multiple") as refused:
            run(config_of(here, output_path=tmp_path / "out", **flags))
        assert refused.value.where == "--preview_prompt"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("steps", [6, 7])
def test_previews_that_a_run_is_too_short_for_are_said_also_in_a_dry_run(
    steps: int, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {"preview_prompt": ("dog",), "preview_steps": steps}
    for more in ({"dry_run": True}, {}):
        run(config_of(here, output_path=tmp_path, **flags, **more))
        said = "".join(capsys.readouterr())
        assert ("--preview_steps 7" in said) == (steps == 7)


@pytest.mark.parametrize("is_dry", [False, True])
def test_previews_of_sharded_networks_are_refused(
    is_dry: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags: dict[str, Any] = {"preview_prompt": ("dog",), "dry_run": is_dry}
    with pytest.raises(UsageError, match="all weights") as refused:
        run(config_of(here, output_path=Path("out"), **flags))
    assert refused.value.where == "--preview_prompt"


@pytest.mark.parametrize(
    "name",
    ["logs/trackers.json", "previews/prompts.json", "previews/step-000002-0.mp4"],
)
def test_a_file_of_the_users_that_has_the_name_of_a_runs_is_never_replaced(
    name: str, here: Path, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    for flags in ({}, {"overwrite": True}):
        with pytest.raises(StateError, match=name):
            train(here, output_path=tmp_path, max_steps=1, **flags)
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [tmp_path / name]


def test_overwriting_removes_the_previews_of_the_run_alone(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    names = ("step-000002-0.png", "cat.png")
    RunFiles.read(tmp_path).add([f"previews/{names[0]}"], 2)
    (tmp_path / "previews").mkdir()
    for name in names:
        (tmp_path / "previews" / name).write_text("mine")
    train(here, output_path=tmp_path, max_steps=1, seed=7, overwrite=True)
    assert [one.name for one in (tmp_path / "previews").iterdir()] == ["cat.png"]


def test_a_preset_of_what_previews_alone_load_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project(tmp_path)
    preset = train(here, output_path=here / "first", max_steps=1)
    let_tiny_have_experts(monkeypatch)
    models = weights_of(here / "model")
    models["dit2"] = copied_denoiser(here / "model", tmp_path / "transformer_2")
    given: dict[str, Any] = {"model_paths": json.dumps(list(models.values()))}
    given |= {"preset_lora_path": preset / "step-1.safetensors"}
    given |= {"lora_base_model": "dit2", "lora_target_modules": "to_q"}
    with pytest.raises(UsageError, match=r"(?s)--preset_lora_path: .*dit, .*dit2"):
        resolve(config_of(here, **given))
    assert resolve(config_of(here, preview_prompt=("dog",), **given)).preset is not None
