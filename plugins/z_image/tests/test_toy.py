"""The toy has the published layout, and diffusers loads it."""

import pytest
from diffusers import DiffusionPipeline
from transformers import AutoTokenizer

from tests.support.toys import toy

TEXT = "a dog and é 红 🙂"


@pytest.mark.parametrize("variant", ["base", "turbo"])
def test_diffusers_loads_the_folder_as_its_own_pipeline(variant: str) -> None:
    pipeline = DiffusionPipeline.from_pretrained(toy("z_image", variant))
    assert type(pipeline).__name__ == "ZImagePipeline"
    assert pipeline.text_encoder.config.attention_dropout == 0.1
    assert pipeline.scheduler.config.shift == {"base": 6.0, "turbo": 3.0}[variant]


def test_the_tokenizer_has_the_template_and_knows_every_byte() -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy("z_image", "base") / "tokenizer")
    messages = [{"role": "user", "content": TEXT}]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert text == f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == ids[0]
