"""Options that contradict each other, or are out of range, are refused by their names."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, UsageError
from dstrain.config import LoraFile, dataset_flags, validate

from tests.support.command_lines import toy_config

V, STORE = Path("v"), Path("store")
FOLDER: dict[str, Any] = {"dataset_base_path": "a"}
GIVEN: tuple[dict[str, Any], ...] = (
    {},
    {"height": 512, "width": 768},
    {"toy": False, "model_paths": '["a.safetensors", ["b1.safetensors"]]'},
    {"toy": False, "model_id_with_origin_paths": "a/b:c/*.safetensors,a/b:vae/d"},
    {"task": "sft:data_process", "output_path": None, "feature_cache": STORE},
    {"task": "sft:data_process"},
    {"task": "sft:train", "dataset_base_path": None, "feature_cache": STORE},
    {"trainable_models": "controlnet", "lora_base_model": "dit", "lora_rank": 8},
    {"num_epochs": 3, "max_steps": 10},
    {"dry_run": True, "toy": False, "dataset_base_path": None, "output_path": None},
    {"use_gradient_checkpointing_offload": True},
    {"lr_scheduler": "cosine", "lr_warmup_steps": 5},
    {"learning_rate": 1},
    {"validation_dataset_base_path": V, "validation_steps": 2},
    {"lr_scheduler": "polynomial", "learning_rate": 2e-7, "ema_decay": 0.9},
    {"mask_column": "mask", "unmasked_weight": 0.9},
    {"alpha_mask": True},
    {"resolution": "64", "bucket_min_side": 64, "bucket_max_side": 64},
    {"dataset_base_path": None, "dataset": FOLDER},
    {"unmasked_weight": 0.5, "dataset": (FOLDER | {"alpha_mask": True}, FOLDER)},
    {"lora_rank": 2**15},
    {"lora_dropout": 0.1},
    {"validation_split": 0.1, "validation_steps": 2},
)


@pytest.mark.parametrize("changes", GIVEN)
def test_what_fits_together_is_accepted(changes: dict[str, Any]) -> None:
    validate(toy_config(**changes))


REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("height", "--width", {"height": 512}),
    ("width", "--height", {"width": 512}),
    ("toy", "--model_paths", {"model_paths": '["a"]'}),
    ("toy", "--model_id_with_origin_paths", {"model_id_with_origin_paths": "a/b:c"}),
    ("toy", "--model_id", {"model_id": "a/b"}),
    ("toy", "--hub", {"hub": "huggingface"}),
    ("no_use_gradient_checkpointing", "--use_gradient_checkpointing_offload",
     {"use_gradient_checkpointing": False, "use_gradient_checkpointing_offload": True}),
    ("resolution", "--height", {"resolution": "512", "height": 64, "width": 64}),
    ("resolution", "--max_pixels", {"resolution": "512", "max_pixels": 99}),
    ("bucket_step", "--resolution", {"bucket_step": 64}),
    ("bucket_upscale", "--resolution", {"bucket_upscale": True}),
    ("bucket_min_side", "--resolution", {"bucket_min_side": 64}),
    ("bucket_max_side", "--resolution", {"bucket_max_side": 64}),
    ("bucket_min_side", "65", {"resolution": "64", "bucket_min_side": 65, "bucket_max_side": 64}),
    ("keep_tags", "--shuffle_tags", {"keep_tags": 1}),
    ("caption_variants", "--shuffle_tags", {"caption_variants": 4}),
    ("model_id", "", {"toy": False}),
    ("model_id", "", {"toy": False, "model_paths": "[]"}),
    ("model_id", "", {"toy": False, "model_id": " "}),
    ("lora_base_model", "dit", {"trainable_models": "dit", "lora_base_model": "dit"}),
    ("lora_base_model", "dit", {"trainable_models": "dit.blocks.3", "lora_base_model": "vae,dit"}),
    ("lora_rank", "--trainable_models", {"trainable_models": "dit", "lora_rank": 8}),
    ("lora_rank", "--trainable_models", {"trainable_models": "dit", "typed": frozenset({"lora_rank"})}),
    ("lora_alpha", "--trainable_models", {"trainable_models": "dit", "lora_alpha": 8.0}),
    ("loraplus_lr_ratio", "--trainable_models", {"trainable_models": "dit", "loraplus_lr_ratio": 2.0}),
    ("trainable_models", "", {"trainable_models": " , "}),
    ("lora_target_modules", "", {"lora_target_modules": ""}),
    ("output_path", "", {"output_path": None}),
    ("output_path", "", {"output_path": None, "feature_cache": STORE}),
    ("output_path", "--feature_cache", {"task": "sft:data_process", "output_path": None}),
    ("output_path", "", {"task": "sft:train", "output_path": None, "feature_cache": STORE}),
    ("output_path", "dataset", {"dataset_base_path": V, "output_path": V / "../v"}),
    ("output_path", "dataset", {"dataset": (FOLDER,), "output_path": Path("a")}),
    ("output_path", "dataset", {"validation_dataset_base_path": V, "output_path": V}),
    ("feature_cache", "dataset", {"dataset_base_path": V, "feature_cache": V}),
    ("dataset_base_path", "", {"dataset_base_path": None}),
    ("dataset_base_path", "--feature_cache", {"task": "sft:train", "dataset_base_path": None}),
    ("task", "sft, sft:data_process, sft:train", {"task": "sft:trian"}),
    ("task", "'sft:'", {"task": "sft:"}),
    ("task", "''", {"task": ""}),
    ("lr_warmup_steps", "--lr_scheduler constant", {"lr_warmup_steps": 5}),
    ("lr_scheduler", "--lr_warmup_steps", {"lr_scheduler": "constant_with_warmup"}),
    ("lr_scheduler", "'cosine'", {"lr_scheduler": "cosin"}),
    ("lr_scheduler_power", "polynomial", {"lr_scheduler_power": 2.0}),
    ("lr_scheduler_num_cycles", "cosine_with_restarts", {"lr_scheduler_num_cycles": 2}),
    ("timestep_shift", "--timestep_sampling", {"timestep_sampling": "uniform", "timestep_shift": 3.0}),
    ("timestep_std", "logit_normal", {"timestep_sampling": "shifted", "timestep_std": 2.0}),
    ("min_snr_gamma", "min_snr", {"loss_weighting": "none", "min_snr_gamma": 2.0}),
    ("min_snr_gamma", "min_snr", {"loss_weighting": "none", "typed": frozenset({"min_snr_gamma"})}),
    ("huber_delta", "--loss huber", {"huber_delta": 0.2}),
    ("customized_optimizer", "--optimizer", {"customized_optimizer": "a.B", "optimizer": "lion"}),
    ("customized_optimizer", "'lion'", {"customized_optimizer": "lion"}),
    ("learning_rate", "polynomial", {"lr_scheduler": "polynomial", "learning_rate": 1e-7}),
    ("learning_rate", "1e-08", {"lr_scheduler": "polynomial", "learning_rate": "1,dit=1e-8"}),
    ("validation_steps", "--validation_split", {"validation_steps": 2}),
    ("validation_dataset_metadata_path", "--validation_dataset_base_path", {"validation_dataset_metadata_path": V}),
    ("validation_split", "--validation_dataset_base_path",
     {"validation_dataset_base_path": V, "validation_split": 0.1}),
    ("preset_lora_model", "--preset_lora_path", {"preset_lora_model": "dit"}),
    ("resume", "--overwrite", {"resume": "auto", "overwrite": True}),
    ("resume_from_checkpoint", "--overwrite", {"resume_from_checkpoint": V, "overwrite": True}),
    ("resume", "--resume_from_checkpoint", {"resume": "auto", "resume_from_checkpoint": V}),
    ("frame_samples", "uniform", {"frame_sampling": "uniform"}),
    ("frame_samples", "uniform", {"frame_sampling": "chunk", "frame_samples": 2}),
    ("mask_column", "", {"mask_column": " "}),
    ("alpha_mask", "--mask_column", {"mask_column": "mask", "alpha_mask": True}),
    ("unmasked_weight", "--mask_column", {"unmasked_weight": 0.1}),
    ("unmasked_weight", "--mask_column", {"typed": frozenset({"unmasked_weight"})}),
    ("lora_base_model", "", {"lora_base_model": ","}),
)  # fmt: skip
OF_A_DATASET = tuple(
    (f"dataset 2: --{where}", named, {"dataset": (FOLDER, FOLDER | changes)})
    for where, named, changes in REFUSED
    if changes.keys() <= dataset_flags().keys() - {"dataset_base_path"}
)
"""What a dataset has of its own is refused as what the run has."""


@pytest.mark.parametrize(
    ("where", "named", "changes"),
    REFUSED + OF_A_DATASET,
    ids=lambda value: str(value)[:60],
)
def test_what_contradicts_itself_is_refused_with_the_other_option(
    changes: dict[str, Any], where: str, named: str
) -> None:
    with pytest.raises(UsageError) as caught:
        validate(toy_config(**changes))
    assert caught.value.where == f"--{where}"
    assert named in caught.value.what
    assert len(caught.value.help_lines) <= 3


WRONG: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.0, float("nan"), float("inf"), "1e-4"),
    "caption_dropout": (1.0, -0.1),
    "weight_decay": (-0.1, float("inf"), True),
    "seed": (-1, 2**63, 1.5),
    "batch_size": (True, 0),
    "num_frames": ("17", 0),
    "frame_sampling": ("tail",),
    "mixed_precision": ("fp16",),
    "output_path": (3,),
    "dataset_root": (["a", 3],),
    "dataset": (3,),
}
"""Option -> values of another type, out of its bounds or not among its choices."""


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_does_not_fit_is_refused_by_its_option(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(UsageError) as caught:
            validate(toy_config(**{name: value}))
        assert caught.value.where == f"--{name}"


@pytest.mark.parametrize(
    "changes",
    [{"toy": False}, {"height": 512}, {"lora": (3,)}, {"denoising_strength": 1.5}],
)
def test_generation_is_checked_too(changes: dict[str, Any]) -> None:
    lora, output = (LoraFile(Path("l")),), Path("x.png")
    good = GenerateConfig(model="m", toy=True, prompt="a", output=output, lora=lora)
    validate(good)
    validate(dataclasses.replace(good, denoising_strength=1.0))
    with pytest.raises(UsageError):
        validate(dataclasses.replace(good, **changes))


def test_without_a_dataset_the_stage_that_needs_none_is_named() -> None:
    both = toy_config(dataset_base_path=None, feature_cache=Path("cache"))
    with pytest.raises(UsageError) as refused:
        validate(both)
    assert refused.value.help_lines[0].endswith("--task sft:train")
    validate(dataclasses.replace(both, task="sft:train"))
