"""Options that contradict each other, or are out of range, are refused with the reason."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, UsageError
from dstrain.config import LoraFile, validate

from tests.support.command_lines import toy_config


@pytest.mark.parametrize(
    ("task", "name", "stage"),
    [
        ("sft", "sft", ""),
        ("sft:train", "sft", "train"),
        ("a:data_process", "a", "data_process"),
    ],
)
def test_a_task_has_a_name_and_a_stage(task: str, name: str, stage: str) -> None:
    config = toy_config(task=task)
    validate(config)
    assert (config.task_name, config.stage) == (name, stage)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"height": 512, "width": 768},
        {
            "toy": False,
            "model_paths": '["a.safetensors", ["b1.safetensors", "b2.safetensors"]]',
        },
        {
            "toy": False,
            "model_id_with_origin_paths": "a/b:c/*.safetensors,a/b:vae/d.safetensors",
        },
        {
            "task": "sft:data_process",
            "output_path": None,
            "feature_cache": Path("store"),
        },
        {"task": "sft:data_process"},
        {
            "task": "sft:train",
            "dataset_base_path": None,
            "feature_cache": Path("store"),
        },
        {"trainable_models": "controlnet", "lora_base_model": "dit", "lora_rank": 8},
        {"num_epochs": 3, "max_steps": 10},
        {"dry_run": True, "toy": False, "dataset_base_path": None, "output_path": None},
        {"use_gradient_checkpointing_offload": True},
        {"lr_scheduler": "cosine", "lr_warmup_steps": 5},
        {"learning_rate": 1},
        {"validation_dataset_base_path": Path("v"), "validation_steps": 2},
        {"lr_scheduler": "polynomial", "learning_rate": 2e-7, "ema_decay": 0.9},
        {"enable_wandb_log": True, "wandb_project": "dogs"},
    ],
)
def test_what_fits_together_is_accepted(changes: dict[str, Any]) -> None:
    validate(toy_config(**changes))


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"height": 512}, "--height", "without --width"),
    ({"width": 512}, "--width", "without --height"),
    ({"model_paths": '["a"]'}, "--toy", "model files would not be read"),
    ({"model_id_with_origin_paths": "a/b:c"}, "--toy", "model files would not be read"),
    ({"hub": "huggingface"}, "--hub", "has no effect"),
    (
        {"use_gradient_checkpointing": False, "use_gradient_checkpointing_offload": True},
        "--no_use_gradient_checkpointing", "cannot be combined with --use_gradient_checkpointing_offload",
    ),
    (
        {"use_gradient_checkpointing": False, "blocks_to_swap": 1},
        "--no_use_gradient_checkpointing", "cannot be combined with swapped blocks",
    ),
    ({"resolution": "512,x"}, "--resolution", "expected a number of pixels"),
    ({"resolution": "512,512"}, "--resolution", "512 is named twice"),
    ({"resolution": "512", "height": 64, "width": 64}, "--resolution", "cannot be combined with --height"),
    ({"resolution": "512", "max_pixels": 99}, "--resolution", "cannot be combined with --max_pixels"),
    ({"bucket_step": 64}, "--bucket_step", "without --resolution"),
    ({"bucket_upscale": True}, "--bucket_upscale", "without --resolution"),
    ({"resolution": "64", "bucket_min_side": 65, "bucket_max_side": 64}, "--bucket_min_side", "is 65, more than"),
    ({"keep_tags": 1}, "--keep_tags", "without --shuffle_tags"),
    ({"caption_variants": 4}, "--caption_variants", "without --shuffle_tags"),
    ({"caption_dropout": 1.0}, "--caption_dropout", "less than 1"),
    ({"crops": 0}, "--crops", "1 or more"),
    ({"toy": False}, "--model_id", "no model files"),
    ({"toy": False, "model_paths": "[]"}, "--model_id", "no model files"),
    ({"model_id": "a/b"}, "--toy", "model files would not be read"),
    ({"toy": False, "model_id": " "}, "--model_id", "is empty"),
    ({"trainable_models": "dit", "lora_base_model": "dit"}, "--lora_base_model", "full or with LoRA"),
    ({"trainable_models": "dit.blocks.3", "lora_base_model": "dit"}, "--lora_base_model", "full or with LoRA"),
    ({"trainable_models": "dit", "lora_rank": 8}, "--lora_rank", "has no effect"),
    ({"trainable_models": "dit", "lora_alpha": 8.0}, "--lora_alpha", "has no effect"),
    ({"trainable_models": " , "}, "--trainable_models", "is empty"),
    ({"lora_target_modules": ""}, "--lora_target_modules", "is empty"),
    ({"output_path": None}, "--output_path", "is required"),
    ({"output_path": None, "feature_cache": Path("store")}, "--output_path", "is required"),
    ({"task": "sft:data_process", "output_path": None}, "--output_path", "or --feature_cache"),
    ({"task": "sft:train", "output_path": None, "feature_cache": Path("s")}, "--output_path", "is required"),
    ({"dataset_base_path": None}, "--dataset_base_path", "is required"),
    ({"task": "sft:train", "dataset_base_path": None}, "--dataset_base_path", "or --feature_cache"),
    ({"task": "sft:trian"}, "--task", "sft, sft:data_process, sft:train"),
    ({"task": "sft:"}, "--task", "is not a task or one of its stages"),
    ({"task": ""}, "--task", "is not a task or one of its stages"),
    ({"lr_warmup_steps": 5}, "--lr_warmup_steps", "no warm-up"),
    ({"lr_scheduler": "constant_with_warmup"}, "--lr_scheduler", "needs --lr_warmup_steps"),
    ({"lr_scheduler_power": 2.0}, "--lr_scheduler_power", "without --lr_scheduler polynomial"),
    ({"lr_scheduler_num_cycles": 2}, "--lr_scheduler_num_cycles", "without --lr_scheduler cosine_with_restarts"),
    ({"customized_optimizer": "a.B", "optimizer": "lion"}, "--customized_optimizer", "give one of them"),
    ({"customized_optimizer": "lion"}, "--customized_optimizer", "dotted path of a class"),
    ({"lr_scheduler": "polynomial", "learning_rate": 1e-7}, "--learning_rate", "is 1e-07, but --lr_scheduler"),
    ({"lr_scheduler": "polynomial", "learning_rate": "1,dit=1e-8"}, "--learning_rate", "is 1e-08"),
    ({"optimizer": "schedulefree", "ema_decay": 0.9}, "--ema_decay", "schedulefree averages the weights itself"),
    ({"customized_optimizer": "schedulefree.X", "ema_decay": 0.9}, "--ema_decay", "averages the weights itself"),
    ({"validation_steps": 2}, "--validation_steps", "--validation_split or --validation_dataset_base_path"),
    ({"validation_dataset_metadata_path": Path("v.csv")}, "--validation_dataset_metadata_path", "without"),
    ({"validation_dataset_base_path": Path("v"), "validation_split": 0.1}, "--validation_split", "give one of them"),
    ({"learning_rate": "dit=x"}, "--learning_rate", "not a valid float"),
    ({"trainable_models": "dit", "loraplus_lr_ratio": 2.0}, "--loraplus_lr_ratio", "has no effect"),
    ({"lr_scheduler": "cosin"}, "--lr_scheduler", "did you mean 'cosine'"),
    ({"max_timestep_boundary": 1.5}, "--max_timestep_boundary", "1 or less"),
    ({"learning_rate": 0.0}, "--learning_rate", "more than 0"),
    ({"learning_rate": float("nan")}, "--learning_rate", "finite"),
    ({"learning_rate": "1e-4"}, "--learning_rate", "expected float"),
    ({"weight_decay": -0.1}, "--weight_decay", "0 or more"),
    ({"max_grad_norm": -1.0}, "--max_grad_norm", "0 or more"),
    ({"seed": -1}, "--seed", "0 or more"),
    ({"seed": 2**63}, "--seed", "or less"),
    ({"batch_size": True}, "--batch_size", "expected int"),
    ({"num_frames": "17"}, "--num_frames", "expected int"),
    ({"num_frames": "17,x"}, "--num_frames", "expected a number of frames, such as 81, or several"),
    ({"num_frames": "17,17"}, "--num_frames", "17 is named twice"),
    ({"frame_sampling": "uniform"}, "--frame_samples", "goes together with"),
    ({"frame_sampling": "chunk", "frame_samples": 2}, "--frame_samples", "goes together with --frame_sampling uniform"),
    ({"frame_sampling": "tail"}, "--frame_sampling", "one of head, chunk, uniform"),
    ({"mixed_precision": "fp16"}, "--mixed_precision", "one of no, bf16"),
    *(({name: 0}, f"--{name}", "1 or more") for name in ("num_epochs", "max_steps", "batch_size", "lora_rank",
      "dataset_repeat", "gradient_accumulation_steps", "save_steps", "max_pixels", "num_frames", "frame_samples")),
    ({"dataset_num_workers": -1}, "--dataset_num_workers", "0 or more"),
    ({"report_to": "wandb,tensorbord"}, "--report_to", "did you mean 'tensorboard'?"),
    ({"report_to": " ,"}, "--report_to", "is empty"),
    ({"offload_models": " ,"}, "--offload_models", "is empty"),
    ({"tile_size": 64}, "--tile_size", "has no effect without --tiled"),
    ({"tile_stride": 64, "framewise_decoding": True}, "--tile_stride", "has no effect without --tiled"),
    ({"tiled": True, "tile_size": 64, "tile_stride": 72}, "--tile_stride", "is 72, more than --tile_size 64"),
    ({"tiled": True, "tile_size": 0}, "--tile_size", "1 or more"),
    ({"wandb_project": "dogs", "report_to": "swanlab"}, "--wandb_project", "without --report_to wandb"),
    ({"swanlab_project": "dogs"}, "--swanlab_project", "without --report_to swanlab"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "where", "reason"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_what_contradicts_itself_is_refused_with_the_reason(
    changes: dict[str, Any], where: str, reason: str
) -> None:
    with pytest.raises(UsageError) as caught:
        validate(toy_config(**changes))
    assert caught.value.where == where
    assert reason in caught.value.what
    assert len(caught.value.help_lines) <= 3


def test_what_is_required_is_reported_with_its_meaning() -> None:
    with pytest.raises(UsageError) as caught:
        validate(toy_config(output_path=None))
    assert str(caught.value).endswith(
        "--output_path: is required: the folder for checkpoints and logs"
    )


def test_a_prompt_is_the_users() -> None:
    validate(toy_config(preview_prompt=("a sign that says hf_abcdefghijklmnopqrstu",)))


def test_generation_is_checked_too() -> None:
    good = GenerateConfig(
        model="faky",
        toy=True,
        prompt="a cat",
        output=Path("x.png"),
        lora=(LoraFile(Path("l")),),
    )
    validate(good)
    for changes in (
        {"toy": False},
        {"height": 512},
        {"num_inference_steps": 0},
        {"guidance_scale": -1.0},
        {"lora": (3,)},
        {"trajectory": True},
        {"denoising_strength": 0.0},
        {"denoising_strength": 1.5},
        {
            "dataset": Path("p.csv"),
            "prompt": None,
            "trajectory": True,
            "denoising_strength": 0.5,
        },
        {"prompt": None, "dataset": Path("p.csv"), "overwrite": True},
    ):
        with pytest.raises(UsageError):
            validate(dataclasses.replace(good, **changes))


@pytest.mark.parametrize(
    ("changes", "flag", "words"),
    [
        ({"mask_column": " "}, "--mask_column", "is empty"),
        (
            {"mask_column": "mask", "alpha_mask": True},
            "--alpha_mask",
            "cannot be combined with --mask_column",
        ),
        (
            {"unmasked_weight": 0.1},
            "--unmasked_weight",
            "has no effect without --mask_column or --alpha_mask",
        ),
        (
            {"alpha_mask": True, "unmasked_weight": 1.0},
            "--unmasked_weight",
            "less than 1",
        ),
        ({"alpha_mask": True, "unmasked_weight": -0.1}, "--unmasked_weight", "0"),
    ],
)
def test_masks_that_say_nothing_or_two_things_are_refused(
    changes: dict[str, Any], flag: str, words: str
) -> None:
    validate(toy_config(mask_column="mask", unmasked_weight=0.9))
    validate(toy_config(alpha_mask=True))
    with pytest.raises(UsageError, match=words) as caught:
        validate(toy_config(**changes))
    assert caught.value.where == flag


def test_without_a_dataset_the_stage_that_needs_none_is_named() -> None:
    both = toy_config(dataset_base_path=None, feature_cache=Path("cache"))
    with pytest.raises(UsageError) as refused:
        validate(both)
    advice = "to train from a full feature cache alone, give --task sft:train"
    assert refused.value.help_lines == (advice,)
    validate(dataclasses.replace(both, task="sft:train"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_id", "Tiny/Tiny"), ("model_paths", '["a.safetensors"]')],
)
def test_a_toy_reads_no_model_files_and_both_ways_out_are_said(
    name: str, value: str
) -> None:
    with pytest.raises(UsageError) as caught:
        validate(toy_config(**{name: value}))
    assert (caught.value.where, caught.value.what) == (
        "--toy",
        "builds a small model with random weights, so model files would not be read: "
        f"give either --toy or --{name}",
    )
    assert caught.value.help_lines == (
        "--model faky --toy is a toy of that family",
        f"without --toy, the files of --{name} are read",
    )
