"""Qwen2.5-VL's processor: a text with pictures in it -> token ids, patches, and which
tokens stand for a picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dstrain.plugin import InputError
from PIL import Image
from torch import Tensor

IMAGE_TOKEN = "<|image_pad|>"


@dataclass(frozen=True)
class Processor:
    """What transformers' Qwen2VLProcessor does with texts and pictures; that class
    exists only with torchvision.

    image_processor: the Qwen2VLImageProcessorPil, whose pixels are the same with and
    without torchvision.
    """

    tokenizer: Any
    image_processor: Any

    @classmethod
    def from_folder(cls, folder: Path) -> "Processor":
        """Read tokenizer and preprocessor_config.json from a published `processor`
        folder.
        """
        from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil

        return cls(
            Qwen2Tokenizer.from_pretrained(folder, local_files_only=True),
            Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True),
        )

    def __call__(
        self, text: str, images: Sequence[Image.Image], max_tokens: int
    ) -> dict[str, Tensor]:
        """Return what the text encoder reads, by the names of its arguments; at most
        `max_tokens` tokens are kept.

        Each <|image_pad|> of the text stands for one picture and becomes as many as the
        picture has tokens: its patches of 14x14 pixels, merged 2x2.
        `mm_token_type_ids`, (1, tokens), is 1 where a token stands for a picture:
        without it transformers gives all tokens the positions of a text, and pictures
        lose their rows and columns. Raises InputError when the tokens that stand for
        pictures are not those of `pictures`.
        """
        patches = self.image_processor(images=list(images), return_tensors="pt")
        counts = (
            patches["image_grid_thw"].prod(1) // self.image_processor.merge_size**2
        ).tolist()
        before, *after = text.split(IMAGE_TOKEN)
        if len(after) != len(counts):
            what = f"the text has {len(after)} {IMAGE_TOKEN} for {len(counts)} pictures; a prompt has none of its own"
            raise InputError("prompt", what)
        whole = before + "".join(
            IMAGE_TOKEN * count + rest
            for count, rest in zip(counts, after, strict=True)
        )
        tokens = self.tokenizer(
            [whole], max_length=max_tokens, truncation=True, return_tensors="pt"
        )
        stands = tokens["input_ids"] == self.tokenizer.convert_tokens_to_ids(
            IMAGE_TOKEN
        )
        if stands.sum() != sum(counts):
            raise InputError(
                "pictures",
                f"have {sum(counts)} tokens, and a text with pictures {max_tokens}; give fewer",
            )
        return {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "mm_token_type_ids": stands.to(torch.int32),
            "pixel_values": patches["pixel_values"],
            "image_grid_thw": patches["image_grid_thw"],
        }
