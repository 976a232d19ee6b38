"""Flags of other trainers are refused with what to use instead."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import GenerateConfig, TrainConfig
from dstrain.cli import advice
from dstrain.cli.main import main
from dstrain.cli.unsupported import no_such, unused_variables
from dstrain.config import flags
from dstrain.registry import load_family

from tests.support.command_lines import BASE

Install = Callable[..., Path]
Source = Callable[..., str]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--network_dim", "use --lora_rank"),
        ("--max_train_steps", "use --max_steps"),
        (
            "--enable_optimizer_cpu_offload",
            "use --optimizer paged_adamw8bit: its state is a quarter, and moves to RAM where the GPU is full",
        ),
        (
            "--dmd2_guidance_lora_rank",
            "this distillation is not supported; use --task direct_distill",
        ),
        (
            "--guidance_scale",
            "leave it out: training has no guidance (1 for FLUX's embedded one); `dstrain generate` has this option",
        ),
        ("--num_inference_steps", "it is an option of `dstrain generate`"),
        ("--resume_from", "use --resume PATH, which resumes where a run stopped"),
        (
            "--dataset_config",
            "use --config FILE: a table [[dataset]] for each (docs/guide/captions-and-buckets.md#several-datasets)",
        ),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_flag_of_another_trainer_gets_advice(
    flag: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, flag, "3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"dstrain: error: {flag}: no such option",
        f"  {line}",
    ]


def test_no_advice_is_for_a_flag_that_exists_or_names_one_that_does_not() -> None:
    known = {
        flag.name for config in (TrainConfig, GenerateConfig) for flag in flags(config)
    } | {"config", "debug"}
    others = [name for names in advice().values() for name in names]
    assert len(others) == len(set(others))
    assert known & set(others) == {"guidance_scale"}  # of `generate` alone
    text = " ".join(advice())
    assert set(re.findall(r"--(\w+)", text)) <= known | {"config_file"}


def test_advice_is_for_the_flag_itself_however_it_is_written() -> None:
    for written in ("rank", "network_dim", "--network-dim"):
        advice = ("no such option", "use --lora_rank")
        assert no_such(written, ["--lora_rank"]) == advice
        # `dstrain generate` has no such option.
        assert no_such(written, ["--lora"]) == ("no such option",)
    assert no_such("ran", []) == ("no such option",)
    assert no_such("--lora_rnak", ["--lora_rank"]) == (
        "no such option; did you mean '--lora_rank'?",
    )


def test_an_option_that_is_only_half_alike_is_not_offered() -> None:
    known = [f"--{flag.name}" for flag in flags(TrainConfig)]
    for name in ("guidance", "guidance_scales", "tokeniser_path", "noise_offset"):
        assert no_such(f"--{name}", known)[0] == "no such option"
    for name, meant in (
        ("lora_rnak", "lora_rank"),
        ("blockswap", "blocks_to_swap"),
        ("preview_prompts", "preview_prompt"),
    ):
        assert f"did you mean '--{meant}'?" in no_such(f"--{name}", known)[0]


def test_a_variable_without_effect_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unused_variables() == []
    monkeypatch.setenv("DIFFSYNTH_ATTENTION_IMPLEMENTATION", "sage_attention")
    (line,) = unused_variables()
    assert line.startswith("variable DIFFSYNTH_ATTENTION_IMPLEMENTATION has no effect")


GUIDE = Path("docs/guide/from-diffsynth-studio.md")
FLAGS_OF_DIFFSYNTH = [
    "align_to_opensource_format", "audio_processor_path", "cpu_offload_split_threshold", "customized_optimizer",
    "data_file_keys", "dataset_base_path", "dataset_metadata_path", "dataset_num_workers", "dataset_repeat",
    "dmd2_teacher_cfg_scale", "enable_csv_log", "enable_lora_hot_loading", "enable_model_cpu_offload",
    "enable_optimizer_cpu_offload", "enable_swanlab_log", "enable_tensorboard_log", "enable_wandb_log",
    "extra_inputs", "find_unused_parameters", "fp8_models", "framewise_decoding", "gradient_accumulation_steps",
    "height", "initialize_model_on_cpu", "learning_rate", "lora_base_model", "lora_checkpoint", "lora_rank",
    "lora_target_modules", "max_pixels", "max_timestep_boundary", "min_timestep_boundary",
    "model_id_with_origin_paths", "model_paths", "num_epochs", "num_frames", "offload_models", "output_path",
    "preset_lora_model", "preset_lora_path", "processor_path", "quant_options", "remove_prefix_in_ckpt",
    "resume_from_checkpoint", "save_steps", "swanlab_project", "task", "template_model_id_or_path",
    "tokenizer_1_path", "tokenizer_2_path", "tokenizer_path", "trainable_models", "use_gradient_checkpointing",
    "use_gradient_checkpointing_offload", "wandb_project", "weight_decay", "width", "zero_cond_t",
]  # fmt: skip
"""Those of its training scripts for the three families; one stands for all of `dmd2_`."""


@pytest.mark.parametrize("name", FLAGS_OF_DIFFSYNTH)
def test_every_flag_of_diffsynth_studio_acts_here_or_has_advice(name: str) -> None:
    families = [load_family(one) for one in ("qwen_image", "flux", "wan")]
    known = {flag.name for flag in flags(TrainConfig)}
    known |= {option.name for family in families for option in family.options}
    refused = name not in known
    if refused:
        said = no_such(f"--{name}", [f"--{one}" for one in known])
        assert len(said) == 2 and "did you mean" not in said[0], said
    if GUIDE.exists():
        shown = name if not name.startswith("dmd2_") else "dmd2_*"
        rows = [
            line for line in GUIDE.read_text().splitlines() if f"`--{shown}`" in line
        ]
        assert rows
        assert refused == ("refused" in rows[0])


COUNTERPARTS = {
    "musubi-tuner": (
        "lora_rank: dim_from_weights network_dim",
        "lora_alpha: network_alpha",
        "lora_checkpoint: network_weights",
        "num_epochs: max_train_epochs",
        "max_steps: max_train_steps steps",
        "preview_prompt: sample_every_n_epochs sample_every_n_steps sample_prompts",
        "keep_checkpoints: save_last_n_epochs save_last_n_epochs_state save_last_n_steps save_last_n_steps_state",
        "save_steps: save_every_n_epochs save_every_n_steps",
        "config: dataset_config",
        "model_paths: clip dit t5 text_encoder text_encoder1 text_encoder2 vae",
        "optimizer: optimizer_type",
        "fp8_models: fp8_base fp8_scaled fp8_llm fp8_t5 fp8_text_encoder fp8_vl",
        "use_gradient_checkpointing: gradient_checkpointing",
        "use_gradient_checkpointing_offload: gradient_checkpointing_cpu_offload",
        "trainable_dtype: full_bf16 full_fp16",
        "tiled: vae_enable_tiling vae_spatial_tile_sample_min_size vae_tiling",
        "offload_models: offload_inactive_dit",
        "feature_cache: cache_directory",
        "compile: compile_backend compile_cache_size_limit compile_dynamic",
        "compile: compile_fullgraph compile_mode dynamo_backend",
        "dataset_num_workers: max_data_loader_n_workers num_workers",
        "output_path: output_dir output_name",
        "loss_weighting: weighting_scheme",
        "report_to: log_with",
        "resolution: enable_bucket",
        "dataset_base_path: image_dir image_directory video_directory",
        "dataset_repeat: num_repeats",
        "num_frames: max_frames target_frames",
        "lora_base_model: dit_high_noise timestep_boundary",
        "lora_dropout: network_dropout",
        "preset_lora_path: base_weights base_weights_multiplier",
        "dataset_metadata_path: image_jsonl_file video_jsonl_file",
        "wandb_project: log_tracker_name",
        "frame_sampling: frame_extraction frame_stride",
        "frame_samples: frame_sample",
        "model_id: edit edit_plus model_type model_version",
        "min_timestep_boundary: max_timestep min_timestep",
        "timestep_sampling: discrete_flow_shift flow_shift",
        "lr_scheduler: lr_decay_steps lr_scheduler_args",
        "lr_scheduler: lr_scheduler_min_lr_ratio lr_scheduler_timescale lr_scheduler_type",
    ),
    "sd-scripts": (
        "lora_checkpoint: lora_weights",
        "batch_size: train_batch_size",
        "keep_checkpoints: save_n_epoch_ratio",
        "model_paths: ae clip_l pretrained_model_name_or_path t5xxl vae_path",
        "fp8_models: fp8_base_unet",
        "use_gradient_checkpointing_offload: cpu_offload_checkpointing unsloth_offload_checkpointing",
        "blocks_to_swap: double_blocks_to_swap single_blocks_to_swap split_mode",
        "optimizer: use_8bit_adam use_lion_optimizer",
        "offload_models: offload",
        "feature_cache: cache_latents cache_latents_to_disk",
        "feature_cache: cache_text_encoder_outputs cache_text_encoder_outputs_to_disk",
        "compile: torch_compile",
        "resolution: max_resolution",
        "bucket_step: bucket_reso_steps",
        "bucket_min_side: min_bucket_reso",
        "bucket_max_side: max_bucket_reso",
        "caption_dropout: caption_dropout_rate",
        "shuffle_tags: shuffle_caption",
        "keep_tags: keep_tokens",
        "flip: flip_aug",
        "crops: random_crop",
        "caption_lines: enable_wildcard",
        "dataset: is_reg prior_loss_weight reg_data_dir",
        "dataset_base_path: train_data_dir",
        "default_caption: class_tokens",
        "dataset_repeat: dataset_repeats",
        "lora_base_model: network_train_text_encoder_only train_text_encoder",
        "dataset_metadata_path: in_json",
        "trigger_word: token_string",
        "validation_steps: validate_every_n_epochs validate_every_n_steps",
        "model_id: ckpt_path",
        "learning_rate: learning_rate_te text_encoder_lr unet_lr",
        "mask_column: conditioning_data_dir masked_loss",
    ),
    "ai-toolkit": (
        "lora_rank: linear rank",
        "lora_alpha: linear_alpha",
        "lora_checkpoint: pretrained_lora_path",
        "learning_rate: lr adapter_lr embedding_lr refiner_lr",
        "preview_prompt: sample_every",
        "keep_checkpoints: max_step_saves_to_keep",
        "save_steps: save_every",
        "model_paths: unet_path",
        "blocks_to_swap: layer_offloading layer_offloading_transformer_percent low_vram",
        "quant_options: load_in_4bit load_in_8bit qtype qtype_te quantize quantize_te text_encoder_bits",
        "feature_cache: cache_tensors_to_disk cache_text_embeddings unload_text_encoder",
        "output_path: training_folder",
        "report_to: use_wandb",
        "resolution: buckets resolutions",
        "bucket_step: bucket_tolerance",
        "caption_dropout: prompt_dropout_prob token_dropout_rate",
        "shuffle_tags: shuffle_tokens",
        "flip: flip_x",
        "dataset: reg_weight",
        "dataset_base_path: folder_path",
        "lr_warmup_steps: num_warmup_steps",
        "optimizer_args: betas optimizer_params",
        "lora_base_model: switch_boundary_every train_high_noise train_low_noise",
        "lora_target_modules: only_if_contains",
        "preset_lora_path: assistant_lora_path lora_path",
        "unmasked_weight: mask_min_value",
        "gradient_accumulation_steps: gradient_accumulation",
        "wandb_project: project_name",
        "timestep_sampling: content_or_style linear_timesteps timestep_type",
        "ema_decay: ema_config use_ema",
        "trigger_word: random_triggers",
        "model_id: arch is_flux name_or_path",
        "min_timestep_boundary: max_denoising_steps min_denoising_steps",
    ),
    "diffusers": (
        "num_epochs: num_train_epochs",
        "batch_size: per_device_train_batch_size",
        "max_grad_norm: gradient_clip",
        "preview_prompt: validation_epochs validation_images validation_prompt validation_prompts",
        "keep_checkpoints: checkpoints_total_limit",
        "save_steps: checkpointing_steps",
        "model_paths: pretrained_vae_model_name_or_path",
        "quant_options: bnb_quantization_config_path do_fp8_training",
        "dataset_num_workers: dataloader_num_workers",
        "resolution: aspect_ratio_buckets video_reshape_mode",
        "caption_dropout: proportion_empty_prompts",
        "flip: random_flip",
        "dataset: class_data_dir class_prompt",
        "dataset: num_class_images prior_generation_precision with_prior_preservation",
        "dataset_base_path: data_dir data_root instance_data_dir instance_data_root dataset_config_name dataset_name",
        "dataset_repeat: repeats",
        "num_frames: max_num_frames",
        "default_caption: instance_prompt",
        "lr_scheduler_num_cycles: lr_num_cycles",
        "lr_scheduler_power: lr_power",
        "weight_decay: adam_weight_decay",
        "optimizer_args: adam_beta1 adam_beta2 adam_epsilon",
        "optimizer: prodigy_beta3 prodigy_decouple prodigy_safeguard_warmup prodigy_use_bias_correction",
        "lora_target_modules: lora_layers",
        "lora_type: use_dora",
        "column: image_column caption_column text_column video_column",
        "wandb_project: tracker_name tracker_project_name wandb_project_name",
        "trigger_word: id_token",
        "model_id: checkpoint_path model_name_or_path",
    ),
    "diffusion-pipe": (
        "lora_checkpoint: init_from_existing",
        "batch_size: micro_batch_size_per_gpu",
        "max_grad_norm: gradient_clipping",
        "save_steps: checkpoint_every_n_epochs checkpoint_every_n_minutes save_every_n_examples",
        "model_paths: clip_path llm_path t5_path",
        "fp8_models: transformer_dtype",
        "use_gradient_checkpointing: activation_checkpointing",
        "blocks_to_swap: pipeline_stages",
        "report_to: enable_wandb",
        "resolution: enable_ar_bucket",
        "num_frames: frame_buckets",
        "lr_warmup_steps: warmup_steps",
        "lora_target_modules: exclude_modules",
        "lokr_factor: decompose_factor",
        "preset_lora_path: fuse_adapters",
        "wandb_project: wandb_tracker_name",
        "timestep_sampling: timestep_sample_method",
        "frame_sampling: video_clip_mode",
        "validation_dataset_base_path: eval_datasets",
        "validation_steps: eval_every_n_steps",
        "model_id: transformer_path",
        "learning_rate: text_encoder_1_lr text_encoder_2_lr",
        "min_timestep_boundary: max_t min_t",
    ),
    "SimpleTuner": (
        "lora_checkpoint: init_lora",
        "max_steps: iterations",
        "preview_prompt: validation_step_interval",
        "save_steps: checkpoint_step_interval",
        "model_paths: pretrained_t5_model_name_or_path pretrained_transformer_model_name_or_path",
        "fp8_models: base_model_precision text_encoder_1_precision text_encoder_2_precision",
        "use_gradient_checkpointing: gradient_checkpointing_interval",
        "blocks_to_swap: enable_group_offload musubi_blocks_to_swap ramtorch",
        "optimizer: optimizer_cpu_offload_method",
        "offload_models: offload_during_startup",
        "feature_cache: cache_dir_text cache_dir_vae latent_cache_dir vae_cache_ondemand",
        "dataset_num_workers: workers",
        "bucket_step: aspect_bucket_alignment",
        "caption_dropout: caption_dropout_probability",
        "dataset_base_path: data_backend_config",
        "optimizer_args: optimizer_beta1 optimizer_beta2 optimizer_config",
        "lora_target_modules: flux_lora_target target_modules",
        "lora_type: lycoris_config peft_lora_mode",
        "gradient_accumulation_steps: accumulate_grad_batches",
        "timestep_sampling: flow_use_beta_schedule flow_use_uniform_schedule",
        "ema_decay: ema_update_interval",
        "validation_steps: eval_steps_interval",
        "model_id: model_family model_flavour",
        "quant_options: quantize_activations quantize_via",
    ),
}
"""Tool -> our flag, with those of the tool's scripts and files that it is here."""
PAIRS = [
    pytest.param(flag, line.partition(":")[0], id=f"{tool}-{flag}")
    for tool, lines in COUNTERPARTS.items()
    for line in lines
    for flag in line.partition(":")[2].split()
]


@pytest.mark.parametrize(("flag", "ours"), PAIRS)
def test_a_flag_of_another_tool_is_answered_with_ours(flag: str, ours: str) -> None:
    known = {f"--{one.name}" for one in flags(TrainConfig)} | {"--config"}
    what, line = no_such(f"--{flag.replace('_', '-')}", known)
    assert what == "no such option"
    assert f"--{ours}" in line
    named = {f"--{name}" for name in re.findall(r"--(\w+)", line)}
    assert named <= known


def test_enough_flags_of_each_tool_are_answered() -> None:
    assert len(PAIRS) >= 60
    for tool in ("musubi-tuner", "sd-scripts", "ai-toolkit", "diffusers"):
        assert sum(str(pair.id).startswith(tool) for pair in PAIRS) >= 30
