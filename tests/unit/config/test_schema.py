"""The flags are exactly the public ones, and what contradicts itself is refused with
the reason.
"""

import copy
import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from dstrain.config.fields import (
    LoraFile,
    flags,
    parse_lora,
    parse_model_paths,
    parse_origins,
)
from dstrain.config.schema import GenerateConfig, TrainConfig
from dstrain.config.validation import validate
from dstrain.errors import UsageError

PUBLIC_TRAIN_FLAGS = """
batch_size data_file_keys dataset_base_path dataset_metadata_path dataset_num_workers dataset_repeat dataset_root
dry_run extra_inputs feature_cache find_unused_parameters frame_samples frame_sampling gradient_accumulation_steps
height hub keep_checkpoints learning_rate lora_alpha lora_base_model lora_checkpoint lora_rank lora_target_modules
loss_weighting lr_scheduler lr_warmup_steps max_grad_norm max_pixels max_steps max_timestep_boundary
min_timestep_boundary mixed_precision model model_id_with_origin_paths model_paths num_epochs num_frames on_bad_sample
output_path overwrite preset_lora_model preset_lora_path preview_prompt preview_steps remove_prefix_in_ckpt resume
resume_from_checkpoint save_steps seed task timestep_sampling toy trainable_models url_cache
use_gradient_checkpointing use_gradient_checkpointing_offload variant weight_decay width
"""
PUBLIC_GENERATE_FLAGS = """
dataset guidance_scale height hub input lora mixed_precision model model_id_with_origin_paths model_paths
negative_prompt num_frames num_inference_steps output prompt seed toy variant width
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
    "timestep_sampling": "shifted",
    "loss_weighting": "bsmntw",
}


def training(**changes: object) -> TrainConfig:
    given: dict[str, Any] = {
        "model": "faky",
        "toy": True,
        "dataset_base_path": Path("data"),
        "output_path": Path("out"),
        **changes,
    }
    return TrainConfig(**given)


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
        "left_out",
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
        assert flag.group, flag.name


def test_choices_are_those_of_the_code_that_acts_on_them() -> None:
    from dstrain.graph import schedule

    choices = {flag.name: flag.choices for flag in flags(TrainConfig)}
    assert choices["timestep_sampling"] == typing.get_args(schedule.Sampling)
    assert choices["loss_weighting"] == typing.get_args(schedule.Weighting)


def test_a_configuration_is_plain_data() -> None:
    config = training(family_options={"tokenizer_path": "here"})
    assert copy.deepcopy(config) == config
    assert TrainConfig(**dataclasses.asdict(config)) == config


def test_lists_are_split_at_commas() -> None:
    config = training(
        trainable_models="text_encoder, dit.blocks.3",
        lora_target_modules=" to_q,to_out.0,",
    )
    assert config.trainables == ("text_encoder", "dit.blocks.3")
    assert config.lora_targets == ("to_q", "to_out.0")
    assert (training().trainables, training().lora_targets) == ((), ())


@pytest.mark.parametrize(
    ("task", "name", "stage"),
    [
        ("sft", "sft", ""),
        ("sft:train", "sft", "train"),
        ("a:data_process", "a", "data_process"),
    ],
)
def test_a_task_has_a_name_and_a_stage(task: str, name: str, stage: str) -> None:
    config = training(task=task)
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
    ],
)
def test_what_fits_together_is_accepted(changes: dict[str, Any]) -> None:
    validate(training(**changes))


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"height": 512}, "--height", "without --width"),
    ({"width": 512}, "--width", "without --height"),
    ({"model_paths": '["a"]'}, "--toy", "model files would not be read"),
    ({"model_id_with_origin_paths": "a/b:c"}, "--toy", "model files would not be read"),
    ({"hub": "huggingface"}, "--hub", "has no effect"),
    ({"toy": False}, "--model_id_with_origin_paths", "no model files"),
    ({"toy": False, "model_paths": "[]"}, "--model_id_with_origin_paths", "no model files"),
    ({"trainable_models": "dit", "lora_base_model": "dit"}, "--lora_base_model", "in full or by LoRA"),
    ({"trainable_models": "dit.blocks.3", "lora_base_model": "dit"}, "--lora_base_model", "in full or by LoRA"),
    ({"trainable_models": "dit", "lora_rank": 8}, "--lora_rank", "has no effect"),
    ({"trainable_models": "dit", "lora_alpha": 8.0}, "--lora_alpha", "has no effect"),
    ({"trainable_models": " , "}, "--trainable_models", "names nothing"),
    ({"lora_target_modules": ""}, "--lora_target_modules", "names nothing"),
    ({"output_path": None}, "--output_path", "is required"),
    ({"output_path": None, "feature_cache": Path("store")}, "--output_path", "is required"),
    ({"task": "sft:data_process", "output_path": None}, "--output_path", "or --feature_cache"),
    ({"task": "sft:train", "output_path": None, "feature_cache": Path("s")}, "--output_path", "is required"),
    ({"dataset_base_path": None}, "--dataset_base_path", "is required"),
    ({"task": "sft:train", "dataset_base_path": None}, "--dataset_base_path", "or --feature_cache"),
    ({"task": "sft:trian"}, "--task", "sft, sft:data_process, sft:train"),
    ({"task": "sft:"}, "--task", "is no task with a stage"),
    ({"task": ""}, "--task", "is no task with a stage"),
    ({"lr_warmup_steps": 5}, "--lr_warmup_steps", "no warm-up"),
    ({"lr_scheduler": "constant_with_warmup"}, "--lr_scheduler", "needs --lr_warmup_steps"),
    ({"lr_scheduler": "cosin"}, "--lr_scheduler", "did you mean 'cosine'"),
    ({"min_timestep_boundary": 0.5, "max_timestep_boundary": 0.5}, "--min_timestep_boundary", "not below"),
    ({"max_timestep_boundary": 1.5}, "--max_timestep_boundary", "1 or less"),
    ({"learning_rate": 0.0}, "--learning_rate", "more than 0"),
    ({"learning_rate": float("nan")}, "--learning_rate", "finite"),
    ({"learning_rate": "1e-4"}, "--learning_rate", "want float"),
    ({"weight_decay": -0.1}, "--weight_decay", "0 or more"),
    ({"max_grad_norm": 0.0}, "--max_grad_norm", "more than 0"),
    ({"seed": -1}, "--seed", "0 or more"),
    ({"seed": 2**63}, "--seed", "or less"),
    ({"batch_size": True}, "--batch_size", "want int"),
    ({"frame_sampling": "uniform"}, "--frame_sampling", "needs --frame_samples"),
    ({"frame_sampling": "chunk", "frame_samples": 2}, "--frame_samples", "has no effect"),
    ({"frame_sampling": "tail"}, "--frame_sampling", "one of head, chunk, uniform"),
    ({"mixed_precision": "fp16"}, "--mixed_precision", "one of no, bf16"),
    *(({name: 0}, f"--{name}", "1 or more") for name in ("num_epochs", "max_steps", "batch_size", "lora_rank",
      "dataset_repeat", "gradient_accumulation_steps", "save_steps", "max_pixels", "num_frames", "frame_samples")),
    ({"dataset_num_workers": -1}, "--dataset_num_workers", "0 or more"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "where", "reason"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_what_contradicts_itself_is_refused_with_the_reason(
    changes: dict[str, Any], where: str, reason: str
) -> None:
    with pytest.raises(UsageError) as caught:
        validate(training(**changes))
    assert caught.value.where == where
    assert reason in caught.value.what
    assert len(caught.value.help_lines) <= 3


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
        {"lora": ("l",)},
    ):
        with pytest.raises(UsageError):
            validate(dataclasses.replace(good, **changes))


def test_model_paths_are_groups_of_files() -> None:
    assert parse_model_paths('["a", ["b", "c"]]') == (("a",), ("b", "c"))
    assert parse_model_paths(None) == ()
    for text in ("a.safetensors", '{"a": 1}', '"a"', "[1]", "[[]]", '[""]', "null"):
        with pytest.raises(UsageError, match="--model_paths"):
            parse_model_paths(text)


def test_origins_are_pairs_of_model_id_and_pattern() -> None:
    assert parse_origins("a/b:c/*.s, d/e:tokenizer/") == (
        ("a/b", "c/*.s", ""),
        ("d/e", "tokenizer/", ""),
    )
    assert parse_origins("a/b@v1:c:d,a/b:e") == (
        ("a/b", "c:d", "v1"),
        ("a/b", "e", "v1"),
    )
    with pytest.raises(UsageError, match="a/b is given at two revisions, v1 and v2"):
        parse_origins("a/b@v1:c,a/b@v2:c")
    for text in ("a/b", "a/b:", ":c", "a/b@:c"):
        with pytest.raises(UsageError, match="want ID:PATTERN"):
            parse_origins(text)
    for pattern in ("/etc/x", "../b/c", "c/../../d"):
        with pytest.raises(UsageError, match="leads out of the model's folder"):
            parse_origins(f"a/b:{pattern}")


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.s", "a.s", 1.0),
        ("a.s:0.5", "a.s", 0.5),
        ("a:b.s", "a:b.s", 1.0),
        ("a:b.s:-1", "a:b.s", -1.0),
        ("a:nan", "a:nan", 1.0),
    ],
)
def test_a_lora_file_may_have_a_scale(text: str, path: str, scale: float) -> None:
    assert parse_lora(text) == LoraFile(Path(path), scale)
