"""The toy has the published layout, and diffusers loads it."""

import json

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file
from transformers import Qwen2Tokenizer

from tests.support.toys import toy


@pytest.mark.filterwarnings("default")
def test_diffusers_loads_the_folder_as_its_own_pipeline() -> None:
    folder = toy("qwen_image", "base")
    pipeline = QwenImagePipeline.from_pretrained(folder)
    assert pipeline.scheduler.config.shift_terminal == 0.02
    encoder = pipeline.text_encoder
    assert encoder.config.text_config.attention_dropout == 0.1
    head, words = encoder.get_output_embeddings(), encoder.get_input_embeddings()
    assert not torch.equal(head.weight, words.weight)
    shards = (folder / "transformer").glob("*.safetensors")
    assert [one.stem[-14:] for one in sorted(shards)] == [
        "00001-of-00002",
        "00002-of-00002",
    ]
    names = load_file(folder / "text_encoder/model.safetensors")
    assert {name.partition(".")[0] for name in names} == {"model", "visual", "lm_head"}


@pytest.mark.parametrize("variant", ["edit", "edit-2509", "edit-2511"])
def test_a_toy_that_edits_has_a_processor_and_the_published_pipeline(
    variant: str,
) -> None:
    assert not (toy("qwen_image", "base") / "processor").exists()
    folder = toy("qwen_image", variant)
    assert (folder / "processor/preprocessor_config.json").exists()
    processor = Qwen2Tokenizer.from_pretrained(folder / "processor")
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    assert processor.get_vocab() == tokenizer.get_vocab()
    config = json.loads((folder / "transformer/config.json").read_text())
    assert config["zero_cond_t"] is (variant == "edit-2511")
    index = json.loads((folder / "model_index.json").read_text())
    assert index["processor"] == ["transformers", "Qwen2VLProcessor"]
    kind = "" if variant == "edit" else "Plus"
    assert index["_class_name"] == f"QwenImageEdit{kind}Pipeline"


def test_the_tokenizer_knows_any_text() -> None:
    tokenizer = Qwen2Tokenizer.from_pretrained(toy("qwen_image", "base") / "tokenizer")
    assert len(tokenizer) == 373
    text = "é 红 🙂 <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    image = tokenizer("<|image_pad|>").input_ids
    assert image == [tokenizer.convert_tokens_to_ids("<|image_pad|>")]
