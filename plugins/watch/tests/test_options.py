"""Options of previews and trackers: what they ask for, and what is refused."""

from typing import Any

import pytest
from dstrain import TrainConfig, UsageError
from dstrain_watch.options import WatchOptions
from dstrain_watch.prompts import prompt_row


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
        (
            {"wandb_project": "dogs", "report_to": "swanlab"},
            "--wandb_project",
            "wandb",
        ),
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
    assert prompt_row("a --word in it").arguments == {}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a --w 64",
            "a --d red",
            "a --s 0",
            "a --l much",
            "a --w 0 --h 0",
            "a --d -5",
        ),
        *(f"a --d {2**63}", "a --l nan", "a --l inf", "a --l -1"),
    ],
)
def test_an_argument_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        prompt_row(text)
    assert caught.value.where == "--preview_prompt"
    assert text in caught.value.what
