"""The processor of Qwen2.5-VL as transformers has it."""

from typing import Any

from transformers import Qwen2VLProcessor


class PublishedProcessor(Qwen2VLProcessor):
    """transformers' own, but for its constructor, which asks for torchvision."""

    def __init__(self, processor: Any) -> None:
        self.image_processor, self.tokenizer = (
            processor.image_processor,
            processor.tokenizer,
        )
        self.video_processor = self.chat_template = None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = self.tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        self.image_ids, self.video_ids, self.audio_ids = (
            [self.image_token_id],
            [self.video_token_id],
            [],
        )
