"""The options are exactly the public ones, and what each of them affects is frozen."""

import copy
import dataclasses
import typing

import pytest
from dstrain.config.fields import Effect, Group, flags
from dstrain.config.options import (
    ENDING_AT_LAST_STEP,
    GenerateConfig,
    TrainConfig,
    options_affecting,
)

from tests.support.command_lines import toy_config

PUBLIC_TRAIN_FLAGS = """
batch_size data_file_keys dataset_base_path dataset_metadata_path dataset_num_workers dataset_repeat dataset_root
dry_run extra_inputs feature_cache find_unused_parameters frame_samples frame_sampling gradient_accumulation_steps
height hub keep_checkpoints learning_rate lora_alpha lora_base_model lora_checkpoint lora_format lora_rank
lora_target_modules loss_weighting lr_scheduler lr_warmup_steps max_grad_norm max_pixels max_steps max_timestep_boundary
min_timestep_boundary mixed_precision model model_id_with_origin_paths model_paths num_epochs num_frames on_bad_sample
on_long_prompt
output_path overwrite preset_lora_model preset_lora_path preview_prompt preview_steps remove_prefix_in_ckpt resume
resume_from_checkpoint save_steps seed task timestep_sampling toy trainable_models url_cache
use_gradient_checkpointing use_gradient_checkpointing_offload variant weight_decay width
"""
PUBLIC_GENERATE_FLAGS = """
dataset guidance_scale height hub input lora mixed_precision model model_id_with_origin_paths model_paths
negative_prompt num_frames num_inference_steps on_long_prompt output prompt run seed toy variant width
"""
DEFAULTS = {
    "task": "sft",
    "dataset_repeat": 1,
    "dataset_num_workers": 0,
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "max_grad_norm": 1.0,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "seed": 0,
    "lora_rank": 32,
    "max_pixels": 1048576,
    "num_frames": 81,
    "frame_sampling": "head",
    "hub": "modelscope",
    "on_bad_sample": "error",
    "on_long_prompt": "truncate",
    "timestep_sampling": "shifted",
    "loss_weighting": "bsmntw",
}


EFFECTS = {
    "training": "model seed dataset_repeat learning_rate weight_decay lr_scheduler lr_warmup_steps max_grad_norm "
                "timestep_sampling loss_weighting min_timestep_boundary max_timestep_boundary height width max_pixels "
                "num_frames frame_sampling frame_samples",
    "resolved": "variant extra_inputs data_file_keys trainable_models lora_base_model lora_target_modules lora_rank "
                "lora_alpha batch_size gradient_accumulation_steps mixed_precision",
    "length": "num_epochs max_steps",
    "recipe": "task batch_size gradient_accumulation_steps",
    "cache": "height width max_pixels data_file_keys extra_inputs num_frames frame_sampling frame_samples",
    "video": "num_frames frame_sampling frame_samples",
    "timestep_sampler": "timestep_sampling loss_weighting min_timestep_boundary max_timestep_boundary",
    "LoRA": "lora_base_model lora_target_modules lora_rank lora_alpha lora_checkpoint",
    "weights": "preset_lora_path lora_checkpoint resume_from_checkpoint",
    "start": "overwrite resume dry_run",
}  # fmt: skip
"""Stored files are compared by these sets: resuming and the feature cache depend on them."""
WITHOUT_EFFECT = """
dataset_base_path dataset_metadata_path dataset_num_workers dataset_root feature_cache find_unused_parameters hub
keep_checkpoints lora_format model_id_with_origin_paths model_paths on_bad_sample on_long_prompt
output_path preset_lora_model
preview_prompt preview_steps remove_prefix_in_ckpt save_steps toy url_cache use_gradient_checkpointing
use_gradient_checkpointing_offload
"""
"""Options of training that decide neither its numbers nor what is stored."""


@pytest.mark.parametrize(
    ("config", "frozen"),
    [(TrainConfig, PUBLIC_TRAIN_FLAGS), (GenerateConfig, PUBLIC_GENERATE_FLAGS)],
)
def test_the_public_flags_are_these(config: type, frozen: str) -> None:
    assert sorted(flag.name for flag in flags(config)) == frozen.split()


def test_every_field_is_a_flag_or_known_not_to_be() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert fields - {flag.name for flag in flags(TrainConfig)} == {
        "family_options",
        "disabled_plugins",
    }


def test_the_defaults_are_the_documented_ones() -> None:
    given = {
        flag.name: flag.default
        for flag in flags(TrainConfig)
        if flag.default not in (None, ()) and flag.kind is not bool
    }
    assert given == DEFAULTS


def test_every_flag_says_in_one_sentence_what_it_does() -> None:
    for flag in (*flags(TrainConfig), *flags(GenerateConfig)):
        assert flag.help.endswith(".") or flag.help.endswith("..."), flag.name
        assert flag.group in typing.get_args(Group), flag.name


def test_an_option_has_effects_or_is_known_to_have_none() -> None:
    without = [flag.name for flag in flags(TrainConfig) if not flag.affects]
    assert sorted(without) == WITHOUT_EFFECT.split()
    for flag in (*flags(TrainConfig), *flags(GenerateConfig)):
        assert flag.affects <= set(typing.get_args(Effect)), flag.name


@pytest.mark.parametrize("effect", typing.get_args(Effect))
def test_what_an_effect_includes_is_frozen(effect: Effect) -> None:
    assert sorted(options_affecting(effect)) == sorted(EFFECTS[effect].split())


def test_options_of_several_effects_are_named_once_in_the_order_of_the_fields() -> None:
    assert options_affecting("cache", "video") == options_affecting("cache")
    assert options_affecting("cache")[:3] == ("height", "width", "max_pixels")


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
