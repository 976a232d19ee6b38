"""The toys have the published layout, and diffusers loads them."""

import pytest
from diffusers import DiffusionPipeline
from dstrain_wan import MODEL
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


def test_the_tokenizer_ends_a_text_and_fills_up_as_umt5s() -> None:
    tokenizer = opened("wan", "t2v").components["tokenizer"]
    assert tokenizer("").input_ids == [1]
    filled = tokenizer("a dog", padding="max_length", max_length=8).input_ids
    assert filled[-1] == tokenizer.pad_token_id == 0
    assert tokenizer.decode(filled, skip_special_tokens=True) == "a dog"
    theirs = AutoTokenizer.from_pretrained(toy("wan", "t2v") / "tokenizer")
    text = "a red dog runs, 红 <pad>"
    assert tokenizer(text).input_ids == theirs(text).input_ids
