"""The options are exactly these, what each of them affects is frozen, and a configuration is
plain data.
"""

import dataclasses
import typing
from pathlib import Path

import pytest
from dstrain import GenerateConfig, TimestepSampler, TrainConfig
from dstrain.config import Effect, flags_by_name
from dstrain.config.fields import own_flags
from dstrain.config.options import ends_at_last_step
from dstrain.plugin import FlowMatchSchedule

from tests.support.command_lines import toy_config
from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    # model
    "height": (None, "cache dataset training"),
    "hub": (None, ""),
    "mixed_precision": (None, "resolved"),
    "model": (None, "training"),
    "model_id": (None, ""),
    "model_id_with_origin_paths": (None, ""),
    "model_paths": (None, ""),
    "seed": (0, "training"),
    "toy": (False, ""),
    "variant": (None, "resolved"),
    "width": (None, "cache dataset training"),
    # task
    "task": ("sft", "recipe"),
    "dry_run": (False, "start"),
    "json": (False, "start"),
    # data
    "accept_code_change": (False, ""),
    "alpha_mask": (False, "cache dataset mask resolved"),
    "column": ((), "cache dataset if_given resolved"),
    "data_file_keys": (None, "cache resolved"),
    "dataset": ((), "resolved"),
    "dataset_base_path": (None, "dataset"),
    "dataset_metadata_path": (None, "dataset"),
    "dataset_num_workers": (0, ""),
    "dataset_repeat": (1, "training"),
    "dataset_root": ((), ""),
    "default_caption": (None, "cache dataset if_given resolved"),
    "extra_inputs": (None, "cache resolved"),
    "feature_cache": (None, ""),
    "frame_samples": (None, "cache dataset training video"),
    "fix_frame_rate": (None, "cache if_given training video"),
    "frame_sampling": ("head", "cache dataset training video"),
    "mask_column": (None, "cache dataset mask resolved"),
    "max_pixels": (1048576, "cache dataset training"),
    "num_frames": (81, "cache dataset training video"),
    "on_bad_sample": ("error", ""),
    "on_long_prompt": ("truncate", ""),
    "unmasked_weight": (0.0, "cache dataset mask resolved"),
    "dataset_form": (None, "dataset"),
    # samples
    "bucket_max_side": (None, "cache dataset if_given training"),
    "bucket_min_side": (None, "cache dataset if_given training"),
    "bucket_step": (None, "cache dataset if_given training"),
    "bucket_upscale": (False, "cache dataset if_given training"),
    "caption_dropout": (0.0, "cache captions dataset if_given training"),
    "caption_lines": (False, "cache captions dataset if_given training"),
    "caption_prefix": (None, "cache captions dataset if_given training"),
    "caption_suffix": (None, "cache captions dataset if_given training"),
    "caption_variants": (None, "cache captions dataset if_given training"),
    "crops": (1, "cache dataset if_given training"),
    "flip": (False, "cache dataset if_given training"),
    "keep_tags": (None, "cache captions dataset if_given training"),
    "resolution": (None, "cache dataset if_given training"),
    "shuffle_tags": (False, "cache captions dataset if_given training"),
    "trigger_word": (None, "cache captions dataset if_given training"),
    # training
    "batch_size": (1, "recipe resolved"),
    "ema_decay": (None, ""),
    "find_unused_parameters": (False, ""),
    "gradient_accumulation_steps": (1, "recipe resolved"),
    "loss_weighting": ("bsmntw", "timestep_sampler training"),
    "max_steps": (None, "length"),
    "max_timestep_boundary": (None, "timestep_sampler training"),
    "min_timestep_boundary": (None, "timestep_sampler training"),
    "num_epochs": (None, "length"),
    "timestep_sampling": ("shifted", "timestep_sampler training"),
    "trainable_models": (None, "resolved"),
    # optimizer
    "customized_optimizer": (None, "resolved"),
    "learning_rate": (None, "training"),
    "loraplus_lr_ratio": (None, "LoRA resolved"),
    "lr_scheduler": ("constant", "training"),
    "lr_scheduler_num_cycles": (None, "resolved"),
    "lr_scheduler_power": (None, "resolved"),
    "lr_warmup_steps": (0, "training"),
    "max_grad_norm": (1.0, "training"),
    "optimizer": ("adamw", "resolved"),
    "optimizer_args": ((), "resolved"),
    "trainable_dtype": ("fp32", "resolved"),
    "weight_decay": (0.01, "training"),
    # LoRA
    "lora_alpha": (None, "LoRA resolved"),
    "lora_base_model": (None, "LoRA resolved"),
    "lora_checkpoint": (None, "LoRA weights"),
    "lora_dropout": (0.0, "LoRA resolved"),
    "lora_rank": (32, "LoRA resolved"),
    "lora_target_modules": (None, "LoRA resolved"),
    "lora_type": ("lora", "LoRA resolved"),
    "preset_lora_model": (None, ""),
    "preset_lora_path": (None, "weights"),
    # memory
    "initialize_model_on_cpu": (False, ""),
    "use_gradient_checkpointing": (None, ""),
    "use_gradient_checkpointing_offload": (False, ""),
    # output
    "keep_checkpoints": (None, ""),
    "lora_format": (None, ""),
    "output_path": (None, ""),
    "overwrite": (False, "start"),
    "resume": (None, "start"),
    "resume_from_checkpoint": (None, "weights"),
    "save_steps": (None, ""),
    # validation
    "validation_dataset_base_path": (None, "timestep_sampler"),
    "validation_dataset_metadata_path": (None, ""),
    "validation_split": (None, "resolved timestep_sampler"),
    "validation_steps": (None, ""),
    # trackers
}
"""Name -> default and effects. Stored files are compared by the effects."""
OF_GENERATE = """
denoising_strength dry_run guidance_scale height hub input lora mixed_precision model
model_id model_id_with_origin_paths model_paths negative_prompt num_frames num_inference_steps
on_long_prompt output overwrite prompt run seed toy
variant width
"""
BOUNDS = {
    ">= 1": "batch_size bucket_max_side bucket_min_side bucket_step dataset_repeat frame_samples "
    "gradient_accumulation_steps height keep_checkpoints lokr_factor lora_rank lr_scheduler_num_cycles max_pixels "
    "max_steps num_epochs num_frames num_inference_steps preview_steps save_steps "
    "validation_steps width",
    ">= 1 <= 64": "crops",
    ">= 2 <= 1000": "caption_variants",
    f">= 0 <= {2**63 - 1}": "seed",
    ">= 0": "dataset_num_workers guidance_scale keep_tags lr_warmup_steps max_grad_norm weight_decay",
    ">= 0 < 1": "caption_dropout lora_dropout unmasked_weight",
    ">= 0 <= 1": "max_timestep_boundary min_timestep_boundary",
    "> 0": "learning_rate lora_alpha loraplus_lr_ratio lr_scheduler_power",
    "> 0 < 1": "ema_decay validation_split",
    "> 0 <= 1": "denoising_strength",
}
"""What values are between -> the options."""


def test_the_options_are_these() -> None:
    assert options_of(TrainConfig) == OPTIONS
    of_generate = options_of(GenerateConfig)
    assert sorted(of_generate) == OF_GENERATE.split()
    defaults = {name: default for name, (default, _) in of_generate.items() if default}
    assert defaults == {"on_long_prompt": "truncate"}


@pytest.mark.needs_plugin
def test_type_bounds_and_choices_of_an_option_follow_from_its_field() -> None:
    bounds = {one: ends for ends in BOUNDS for one in BOUNDS[ends].split()}
    for flag in (*own_flags(TrainConfig), *own_flags(GenerateConfig)):
        ends = {
            ">=": flag.minimum,
            ">": flag.above,
            "<=": flag.maximum,
            "<": flag.below,
        }
        said = " ".join(
            f"{sign} {end}" for sign, end in ends.items() if end is not None
        )
        assert said == bounds.get(flag.name, ""), flag.name
    known = flags_by_name(TrainConfig)
    assert (known["max_steps"].kind, known["caption_dropout"].kind) == (int, float)
    assert known["learning_rate"].by_name
    assert known["num_frames"].listed
    assert known["frame_sampling"].choices == ("head", "chunk", "uniform")
    assert (known["dataset_root"].kind, known["dataset_root"].many) == (Path, True)
    assert known["optimizer_args"].several
    assert known["resume"].bare == "auto"
    assert known["use_gradient_checkpointing"].is_switch
    assert not known["tiled"].is_switch
    assert flags_by_name(GenerateConfig)["output"].required


def test_every_field_is_a_flag_or_known_not_to_be() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    others = {"family_options", "disabled_plugins", "plugin_options"}
    assert fields - {*flags_by_name(TrainConfig)} == others


@pytest.mark.parametrize("config", [TrainConfig, GenerateConfig])
def test_every_flag_is_described_and_acts_in_known_ways(config: type) -> None:
    for flag in own_flags(config):
        assert flag.help.endswith("."), flag.name
        assert flag.affects <= set(typing.get_args(Effect)), flag.name


def test_choices_are_what_the_code_can_do() -> None:
    choices = {flag.name: flag.choices for flag in own_flags(TrainConfig)}
    endless = ("constant", "constant_with_warmup")
    for schedule in (*choices["lr_scheduler"], "package.schedule"):
        assert ends_at_last_step(schedule) == (schedule not in endless)
    schedule = FlowMatchSchedule(shift=1.0)
    assert choices["timestep_sampling"] == (
        *("shifted", "logit_normal", "uniform", "mode"),
    )
    assert choices["loss_weighting"] == ("bsmntw", "none")
    for weighting in choices["loss_weighting"]:
        sampler = TimestepSampler(schedule, weighting=weighting)
        assert sampler.weight(schedule.table).shape == schedule.table.shape


@pytest.mark.parametrize("stage", ["", "train", "data_process"])
def test_a_task_may_name_a_stage_and_without_it_a_cache_means_both(stage: str) -> None:
    config = toy_config(task=f"sft:{stage}".rstrip(":"), feature_cache="cache")
    assert (config.task_name, config.stage) == ("sft", stage)
    assert config.runs_both_stages == (not stage)
    assert not dataclasses.replace(config, feature_cache=None).runs_both_stages
