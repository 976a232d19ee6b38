"""The toys have the published layout, and diffusers loads them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline
from dstrain_wan import MODEL
from dstrain_wan.model_fn import predict
from dstrain_wan.pipeline import PIPELINES
from dstrain_wan.toy import write
from safetensors.torch import load_file


def test_files_are_named_as_published(toys: Mapping[str, Path]) -> None:
    for variant, folder in toys.items():
        files = {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file()
        }
        transformers = (
            ["transformer", "transformer_2"]
            if variant.endswith("a14b")
            else ["transformer"]
        )
        assert {
            "model_index.json",
            "scheduler/scheduler_config.json",
            "text_encoder/model.safetensors",
            "vae/diffusion_pytorch_model.safetensors",
            "tokenizer/tokenizer.json",
            *(
                f"{folder}/diffusion_pytorch_model-00001-of-00002.safetensors"
                for folder in transformers
            ),
        } <= files
        has_encoder = "image_encoder" in PIPELINES[variant].components
        assert ("image_encoder/model.safetensors" in files) is has_encoder


def test_each_of_several_processes_writes_the_whole_toy(
    toys: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    write(tmp_path, "i2v")
    first, second = (
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (toys["i2v"], tmp_path)
    )
    assert first.keys() == second.keys()
    assert all(first[name] == second[name] for name in first)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("variant", MODEL.variants)
def test_diffusers_loads_the_folder_as_its_own_pipeline(
    variant: str, toys: Mapping[str, Path]
) -> None:
    pipeline = DiffusionPipeline.from_pretrained(toys[variant])
    assert type(pipeline) is (
        WanImageToVideoPipeline
        if "input_image" in PIPELINES[variant].inputs and variant != "ti2v-5b"
        else WanPipeline
    )
    boundaries = {
        variant: spec.experts.ranges["dit"][0] / 1000
        for variant, spec in PIPELINES.items()
        if spec.experts
    }
    assert pipeline.config.boundary_ratio == boundaries.get(variant)
    assert pipeline.config.expand_timesteps is (variant == "ti2v-5b")
    assert pipeline.text_encoder.config.dropout_rate == 0.1


def test_a_toy_takes_the_size_that_videos_have_by_default(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    wide = PIPELINES["t2v"].defaults["width"] // 8
    dit = bind_components("t2v")["dit"]
    with torch.no_grad():
        made = predict(
            torch.zeros(1, 16, 1, 2, wide),
            torch.zeros(1),
            torch.zeros(1, 3, 32),
            dit=dit,
        )
    assert made.shape == (1, 16, 1, 2, wide)


def test_the_experts_differ(toys: Mapping[str, Path]) -> None:
    name = "diffusion_pytorch_model-00001-of-00002.safetensors"
    first, second = (
        load_file(toys["t2v-a14b"] / place / name)
        for place in ("transformer", "transformer_2")
    )
    assert not any(
        torch.equal(first[key], second[key]) for key in first if first[key].ndim > 1
    )


def test_another_seed_writes_other_weights_and_sizes_replace_constructor_arguments(
    toys: Mapping[str, Path], tmp_path: Path
) -> None:
    write(
        tmp_path,
        "i2v",
        seed=1,
        sizes={"dit": {"num_layers": 3}, "image_encoder": {"num_hidden_layers": 4}},
    )
    for place in ("vae", "text_encoder"):
        (file,) = (tmp_path / place).glob("*.safetensors")
        assert file.read_bytes() != (toys["i2v"] / place / file.name).read_bytes()
    assert (
        json.loads((tmp_path / "transformer/config.json").read_text())["num_layers"]
        == 3
    )
    assert (
        json.loads((tmp_path / "transformer/config.json").read_text())["image_dim"]
        == 16
    )
    assert (
        json.loads((tmp_path / "image_encoder/config.json").read_text())[
            "num_hidden_layers"
        ]
        == 4
    )


def test_the_tokenizer_ends_a_text_and_fills_up_as_umt5s(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    tokenizer = bind_components("t2v")["tokenizer"]
    assert tokenizer("").input_ids == [1]
    filled = tokenizer("a dog", padding="max_length", max_length=8).input_ids
    assert filled[-1] == tokenizer.pad_token_id == 0
    assert tokenizer.decode(filled, skip_special_tokens=True) == "a dog"
