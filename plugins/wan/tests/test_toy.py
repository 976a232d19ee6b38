"""The toys have the published layout, and diffusers loads them."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from dstrain_wan import MODEL
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.support.toys import opened, toy

SHARDED = "diffusion_pytorch_model-00001-of-00002.safetensors"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("variant", MODEL.variants)
def test_diffusers_loads_the_folder_as_its_own_pipeline(variant: str) -> None:
    folder, spec = toy("wan", variant), MODEL.spec(variant)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    has_image = "input_image" in spec.inputs and variant != "ti2v-5b"
    kind = "WanImageToVideoPipeline" if has_image else "WanPipeline"
    assert type(pipeline).__name__ == kind
    boundary = spec.experts and spec.experts.ranges["dit"][0] / 1000
    assert pipeline.config.boundary_ratio == boundary
    assert pipeline.config.expand_timesteps is (variant == "ti2v-5b")
    assert pipeline.text_encoder.config.dropout_rate == 0.1
    for part in ("transformer", "transformer_2"):
        is_there = (folder / part / SHARDED).exists()
        assert is_there is (part == "transformer" or spec.experts is not None)


def test_it_takes_the_size_that_videos_have_by_default() -> None:
    pipe = opened("wan", "t2v")
    latents = torch.zeros(1, 16, 1, 2, pipe.spec.defaults["width"] // 8)
    values = {"prompt_emb": torch.zeros(1, 3, 32)}
    assert pipe.predict(values, latents, torch.zeros(1)).shape == latents.shape


def test_the_experts_differ() -> None:
    first, second = (
        load_file(toy("wan", "t2v-a14b") / place / SHARDED)
        for place in ("transformer", "transformer_2")
    )
    matrices = [key for key in first if first[key].ndim > 1]
    assert not any(torch.equal(first[key], second[key]) for key in matrices)


def test_another_seed_writes_other_weights_and_sizes_replace_those_of_configurations(
    tmp_path: Path,
) -> None:
    sizes = {"dit": {"num_layers": 3}, "image_encoder": {"num_hidden_layers": 4}}
    MODEL.load("toy")(tmp_path, "i2v", seed=1, sizes=sizes)
    for place in ("vae", "text_encoder"):
        (file,) = (tmp_path / place).glob("*.safetensors")
        assert file.read_bytes() != (toy("wan", "i2v") / place / file.name).read_bytes()
    dit, encoder = (
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("transformer", "image_encoder")
    )
    assert (dit["num_layers"], dit["image_dim"]) == (3, 16)
    assert encoder["num_hidden_layers"] == 4


def test_the_tokenizer_ends_a_text_and_fills_up_as_umt5s() -> None:
    tokenizer = opened("wan", "t2v").components["tokenizer"]
    assert tokenizer("").input_ids == [1]
    filled = tokenizer("a dog", padding="max_length", max_length=8).input_ids
    assert filled[-1] == tokenizer.pad_token_id == 0
    assert tokenizer.decode(filled, skip_special_tokens=True) == "a dog"
    theirs = AutoTokenizer.from_pretrained(toy("wan", "t2v") / "tokenizer")
    text = "a red dog runs, 红 <pad>"
    assert tokenizer(text).input_ids == theirs(text).input_ids
