"""The toy has the published layout, is the same each time, and diffusers loads it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from dstrain_qwen_image.toy import write
from dstrain_qwen_image.units import EDIT_PREFIX, PREFIX
from safetensors import safe_open
from transformers import Qwen2Tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_files_are_named_as_published(toy_folder: Path) -> None:
    assert {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "tokenizer/tokenizer_config.json",
    } <= set(contents(toy_folder))
    with safe_open(toy_folder / "text_encoder/model.safetensors", "pt") as file:
        # A safetensors file has keys() and is itself not iterable.
        heads = {name.partition(".")[0] for name in file.keys()}  # noqa: SIM118
        assert heads == {"model", "visual", "lm_head"}


def test_equal_arguments_write_equal_files_and_leave_the_global_generator_alone(
    toy_folder: Path, tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    write(tmp_path / "again")
    assert torch.equal(before, torch.random.get_rng_state())
    assert contents(tmp_path / "again") == contents(toy_folder)
    write(tmp_path / "other", seed=1)
    different = {
        name
        for name, data in contents(tmp_path / "other").items()
        if data != contents(toy_folder)[name]
    }
    assert all(name.endswith(".safetensors") for name in different)
    assert {Path(name).parent.name for name in different} == {
        "transformer",
        "text_encoder",
        "vae",
    }


def test_a_toy_that_edits_has_a_processor_and_the_edit_templates_64_tokens(
    toy_folder: Path, toy_of: Callable[[str], Path]
) -> None:
    assert not (toy_folder / "processor").exists()
    for variant in ("edit", "edit-2509", "edit-2511"):
        folder = toy_of(variant)
        assert {"preprocessor_config.json", "tokenizer.json"} <= {
            path.name for path in (folder / "processor").iterdir()
        }
        assert (
            len(
                Qwen2Tokenizer.from_pretrained(folder / "processor")(
                    EDIT_PREFIX
                ).input_ids
            )
            == 64
        )
        config = json.loads((folder / "transformer/config.json").read_text())
        assert config["zero_cond_t"] is (variant == "edit-2511")
        index = json.loads((folder / "model_index.json").read_text())
        assert index["processor"] == ["transformers", "Qwen2VLProcessor"]
        assert index["_class_name"] == (
            "QwenImageEditPipeline"
            if variant == "edit"
            else "QwenImageEditPlusPipeline"
        )


def test_sizes_replace_constructor_arguments(tmp_path: Path) -> None:
    sizes = {
        "num_layers": 4,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": (8, 12, 12),
    }
    write(tmp_path, sizes={"dit": sizes})
    config = json.loads((tmp_path / "transformer/config.json").read_text())
    assert {name: config[name] for name in sizes} == {
        **sizes,
        "axes_dims_rope": [8, 12, 12],
    }
    assert config["joint_attention_dim"] == 32


@pytest.mark.filterwarnings("default")
def test_diffusers_loads_the_folder_as_its_own_pipeline(toy_folder: Path) -> None:
    pipeline = QwenImagePipeline.from_pretrained(toy_folder)
    assert pipeline.scheduler.config.shift_terminal == 0.02
    assert pipeline.text_encoder.config.text_config.attention_dropout == 0.1
    weights = (
        pipeline.text_encoder.get_output_embeddings().weight,
        pipeline.text_encoder.get_input_embeddings().weight,
    )
    assert not torch.equal(*weights)


def test_the_tokenizer_turns_the_templates_prefix_into_34_tokens_and_any_text_into_known_ones(
    toy_folder: Path,
) -> None:
    tokenizer = Qwen2Tokenizer.from_pretrained(toy_folder / "tokenizer")
    assert len(tokenizer) == 373
    assert len(tokenizer(PREFIX).input_ids) == 34
    text = "é 红 🙂 <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|image_pad|>").input_ids == [
        tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ]
