"""A training run's configuration is plain data, and its options say what they affect."""

import copy
import dataclasses
import typing
from pathlib import Path

from dstrain import GenerateConfig, TrainConfig
from dstrain.config import Effect, Group, flags
from dstrain.config.options import ENDING_AT_LAST_STEP, options_affecting

from tests.support.command_lines import toy_config
from tests.support.options import options_of


def test_every_field_is_a_flag_or_known_not_to_be() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert fields - {flag.name for flag in flags(TrainConfig)} == {
        "family_options",
        "disabled_plugins",
        "recipe",
    }


def test_every_flag_says_in_one_sentence_what_it_does() -> None:
    for flag in (*flags(TrainConfig), *flags(GenerateConfig)):
        assert flag.help.endswith(".") or flag.help.endswith("..."), flag.name
        assert flag.group in typing.get_args(Group), flag.name


def test_a_task_with_a_feature_cache_and_no_stage_is_run_in_both() -> None:
    cached = toy_config(feature_cache=Path("cache"))
    assert cached.runs_both_stages
    assert not toy_config().runs_both_stages
    for stage in ("data_process", "train"):
        alone = dataclasses.replace(cached, task=f"sft:{stage}")
        assert not alone.runs_both_stages


def test_the_effects_are_known_ones() -> None:
    for flag in (*flags(TrainConfig), *flags(GenerateConfig)):
        assert flag.affects <= set(typing.get_args(Effect)), flag.name


def test_each_effect_is_that_of_an_option() -> None:
    for effect in typing.get_args(Effect):
        assert options_affecting(effect), effect


def test_the_options_of_the_run_itself_are_these() -> None:
    inherited = {flag.name for base in TrainConfig.__bases__ for flag in flags(base)}
    own = {
        name: what
        for name, what in options_of(TrainConfig).items()
        if name not in inherited
    }
    assert own == {"dry_run": (False, "start")}


def test_options_of_several_effects_are_named_once_in_the_order_of_the_fields() -> None:
    assert options_affecting("cache", "video") == options_affecting("cache")
    assert options_affecting("cache")[:3] == ("height", "width", "column")


def test_schedules_that_end_with_the_run_are_schedules() -> None:
    (schedule,) = [f for f in flags(TrainConfig) if f.name == "lr_scheduler"]
    assert set(ENDING_AT_LAST_STEP) < set(schedule.choices)


def test_choices_are_those_of_the_code_that_acts_on_them() -> None:
    from dstrain.graph import noise_schedule

    choices = {flag.name: flag.choices for flag in flags(TrainConfig)}
    assert choices["timestep_sampling"] == typing.get_args(
        noise_schedule.TimestepDistribution
    )
    assert choices["loss_weighting"] == typing.get_args(noise_schedule.Weighting)


def test_a_configuration_is_plain_data() -> None:
    config = toy_config(family_options={"tokenizer_path": "here"})
    assert copy.deepcopy(config) == config
    assert TrainConfig(**dataclasses.asdict(config)) == config
