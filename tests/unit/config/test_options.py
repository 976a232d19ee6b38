"""The options are exactly these, and what each of them affects is frozen."""

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

EFFECTS = {
    "": "accept_code_change dataset_num_workers dataset_root ema_decay feature_cache "
    "find_unused_parameters hub initialize_model_on_cpu keep_checkpoints lora_format model_id "
    "model_id_with_origin_paths model_paths on_bad_sample on_long_prompt output_path "
    "preset_lora_model save_steps toy use_gradient_checkpointing "
    "use_gradient_checkpointing_offload validation_dataset_metadata_path validation_steps",
    "resolved": "customized_optimizer dataset lr_scheduler_num_cycles lr_scheduler_power mixed_precision "
    "optimizer optimizer_args trainable_dtype trainable_models variant",
    "cache captions dataset if_given training": "caption_dropout caption_lines caption_prefix "
    "caption_suffix caption_variants keep_tags shuffle_tags trigger_word",
    "training": "dataset_repeat learning_rate lr_scheduler lr_warmup_steps max_grad_norm model seed "
    "weight_decay",
    "LoRA resolved": "lora_alpha lora_base_model lora_dropout lora_rank lora_target_modules lora_type "
    "loraplus_lr_ratio",
    "cache dataset if_given training": "bucket_max_side bucket_min_side bucket_step "
    "bucket_upscale crops flip resolution",
    "start": "dry_run json overwrite resume",
    "timestep_sampler training": "loss_weighting max_timestep_boundary min_timestep_boundary timestep_sampling",
    "cache dataset mask resolved": "alpha_mask mask_column unmasked_weight",
    "cache dataset training": "height max_pixels width",
    "cache dataset training video": "frame_samples frame_sampling num_frames",
    "dataset": "dataset_base_path dataset_form dataset_metadata_path",
    "cache dataset if_given resolved": "column default_caption",
    "cache resolved": "data_file_keys extra_inputs",
    "length": "max_steps num_epochs",
    "recipe resolved": "batch_size gradient_accumulation_steps",
    "weights": "preset_lora_path resume_from_checkpoint",
    "LoRA weights": "lora_checkpoint",
    "cache if_given training video": "fix_frame_rate",
    "recipe": "task",
    "if_given timestep_sampler training": "min_snr_gamma timestep_mean timestep_shift timestep_std",
    "if_given loss_options training": "huber_delta huber_schedule input_perturbation loss noise_offset",
    "resolved timestep_sampler": "validation_split",
    "timestep_sampler": "validation_dataset_base_path",
}
"""Effects -> the options. Stored files are compared by them."""
BOUNDS = {
    ">= 1": "batch_size bucket_max_side bucket_min_side bucket_step dataset_repeat frame_samples "
    "gradient_accumulation_steps height keep_checkpoints lora_rank lr_scheduler_num_cycles max_pixels "
    "max_steps num_epochs num_frames num_inference_steps save_steps "
    "validation_steps width",
    ">= 1 <= 64": "crops",
    ">= 2 <= 1000": "caption_variants",
    f">= 0 <= {2**63 - 1}": "seed",
    ">= 0": "dataset_num_workers guidance_scale keep_tags lr_warmup_steps max_grad_norm weight_decay",
    ">= 0 <= 10": "input_perturbation noise_offset",
    ">= 0.01 <= 100": "timestep_shift",
    "> 0 <= 1000": "huber_delta",
    ">= 0 < 1": "caption_dropout lora_dropout unmasked_weight",
    ">= 0 <= 1": "max_timestep_boundary min_timestep_boundary",
    "> 0": "learning_rate lora_alpha loraplus_lr_ratio lr_scheduler_power min_snr_gamma timestep_std",
    "> 0 < 1": "ema_decay validation_split",
    "> 0 <= 1": "denoising_strength",
}
"""What values are between -> the options."""


def test_what_options_affect_is_frozen() -> None:
    effects = {one: each for each in EFFECTS for one in EFFECTS[each].split()}
    found = {one.name: " ".join(sorted(one.affects)) for one in own_flags(TrainConfig)}
    assert found == effects


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
    assert not known["toy"].is_switch
    assert flags_by_name(GenerateConfig)["output"].required


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
    names = ("shifted", "logit_normal", "mode", "uniform", "sigmoid")
    assert choices["timestep_sampling"] == names
    assert choices["loss_weighting"] == ("bsmntw", "none", "min_snr")
    for weighting in choices["loss_weighting"]:
        sampler = TimestepSampler(schedule, weighting=weighting)
        assert sampler.weight(schedule.table).shape == schedule.table.shape


@pytest.mark.parametrize("stage", ["", "train", "data_process"])
def test_a_task_may_name_a_stage_and_without_it_a_cache_means_both(stage: str) -> None:
    config = toy_config(task=f"sft:{stage}".rstrip(":"), feature_cache="cache")
    assert (config.task_name, config.stage) == ("sft", stage)
    assert config.runs_both_stages == (not stage)
    assert not dataclasses.replace(config, feature_cache=None).runs_both_stages
