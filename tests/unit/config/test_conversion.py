"""A script gives text for paths and LoRA files, and lists or single values."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from dstrain import GenerateConfig, TrainConfig, UsageError
from dstrain.config import LoraFile, NamedInput, flags, validate
from dstrain.config.conversion import as_keywords


def test_text_stands_for_a_path_in_every_option_that_keeps_one() -> None:
    for config in (TrainConfig, GenerateConfig):
        for flag in flags(config):
            if flag.kind is not Path:
                continue
            given = {"model": "m", "output": "o", flag.name: "some/place"}
            if config is TrainConfig:
                del given["output"]
            kept = getattr(config(**given), flag.name)
            assert kept == ((Path("some/place"),) if flag.many else Path("some/place"))


def test_one_value_or_a_list_may_be_given_where_several_may() -> None:
    config = TrainConfig(
        model="m",
        preview_prompt="a dog",
        column=["prompt=text", "image=file"],
        dataset_root=["a", Path("b")],
        dataset=[{"dataset_base_path": "photos", "repeats": 2}],
        lora_target_modules=["to_q", "to_k"],
        model_id=Path("model"),
        model_paths=[Path("a.safetensors"), ("b.safetensors", "c.safetensors")],
    )
    assert config.preview_prompt == ("a dog",)
    assert config.column == ("prompt=text", "image=file")
    assert config.dataset_root == (Path("a"), Path("b"))
    assert [json.loads(one) for one in config.dataset] == [
        {"dataset_base_path": "photos", "repeats": 2}
    ]
    assert config.lora_target_modules == "to_q,to_k"
    assert config.model_id == "model"
    assert json.loads(config.model_paths or "") == [
        "a.safetensors",
        ["b.safetensors", "c.safetensors"],
    ]
    assert replace(config, seed=3) == replace(config, seed=3)


def test_lora_files_and_inputs_are_written_as_on_the_command_line() -> None:
    config = GenerateConfig(
        model="m", output="out.png", lora="dogs.safetensors:0.5", input="image=a.png"
    )
    assert config.lora == (LoraFile(Path("dogs.safetensors"), 0.5),)
    assert config.input == (NamedInput("image", "a.png"),)
    several = replace(config, lora=["a", LoraFile(Path("b"))], input=["x=1", "y=2"])
    assert [one.path.name for one in several.lora] == ["a", "b"]
    assert [str(one) for one in several.input] == ["x=1", "y=2"]


@pytest.mark.parametrize("name", ("output_path", "preview_prompt", "dataset"))
def test_what_is_neither_is_refused_where_the_configuration_is_checked(
    name: str,
) -> None:
    config = TrainConfig(
        **{"model": "m", "toy": True, "dataset_base_path": "d", "output_path": "o"}
        | {name: 3}
    )
    with pytest.raises(UsageError, match=f"--{name}: expected \\w+, got 3"):
        validate(config)


def test_an_option_that_there_is_not_is_answered_with_the_nearest() -> None:
    what = "TrainConfig has no option 'rank'; did you mean 'lora_rank'"
    with pytest.raises(TypeError, match=what):
        TrainConfig(model="m", rank=32)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no option 'promt'; did you mean 'prompt'"):
        GenerateConfig(model="m", output="o", promt="a")  # type: ignore[call-arg]


def test_flags_in_a_message_are_told_as_a_script_writes_them() -> None:
    message = """dstrain: error: --lora_rank: is 0, of --nothing
  resume with --resume, start over with --overwrite, or without --overwrite
  or run: dstrain --model m --seed 3"""
    told = ["lora_rank=...", "resume='auto'", "overwrite=True"]
    assert as_keywords(message, TrainConfig) == told
