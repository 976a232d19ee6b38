"""Qwen2.5-VL's processor: a text with images in it to token ids and patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dstrain.plugin import InputError
from dstrain.plugin.functional import LongPrompt, report_long_prompt
from PIL import Image
from torch import Tensor

IMAGE_TOKEN = "<|image_pad|>"


@dataclass(frozen=True)
class Processor:
    """Does what transformers' Qwen2VLProcessor does with texts and images; that class
    needs torchvision.
    """

    tokenizer: Any
    image_processor: Any
    """Qwen2VLImageProcessorPil, whose pixels are the same without torchvision."""

    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> "Processor":
        """Load a published `processor` folder."""
        from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil

        return cls(
            Qwen2Tokenizer.from_pretrained(folder, **options),
            Qwen2VLImageProcessorPil.from_pretrained(folder, **options),
        )

    def __call__(
        self,
        text: str,
        images: Sequence[Image.Image],
        max_tokens: int,
        dropped: int = 0,
        suffix: str = "",
    ) -> dict[str, Tensor]:
        """Return the text encoder's arguments; tokens are kept as by `tokenize`.

        Each <|image_pad|> of the text stands for an image and becomes as many as the
        image has tokens: its patches of 14x14 pixels, merged 2x2. `mm_token_type_ids`,
        (1, tokens), is 1 there: without it transformers gives all tokens the positions
        of a text. Raises InputError when these tokens are not those of `images`.
        """
        patches = self.image_processor(images=list(images), return_tensors="pt")
        merged = self.image_processor.merge_size**2
        counts = (patches["image_grid_thw"].prod(1) // merged).tolist()
        before, *after = text.split(IMAGE_TOKEN)
        if len(after) != len(counts):
            what = f"the text has {len(after)} {IMAGE_TOKEN} for {len(counts)} images; a prompt must not contain any"
            raise InputError("prompt", what)
        whole = before
        for count, rest in zip(counts, after, strict=True):
            whole += IMAGE_TOKEN * count + rest
        tokens = tokenize(self.tokenizer, whole, max_tokens, dropped, suffix)
        image_id = self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        is_image = tokens["input_ids"] == image_id
        if is_image.sum() != sum(counts):
            raise InputError(
                "images",
                f"have {sum(counts)} tokens, but text and images together may have {max_tokens}; use fewer",
            )
        return {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "mm_token_type_ids": is_image.to(torch.int32),
            "pixel_values": patches["pixel_values"],
            "image_grid_thw": patches["image_grid_thw"],
        }


def tokenize(
    tokenizer: Any, text: str, max_tokens: int, dropped: int, suffix: str
) -> dict[str, Tensor]:
    """Return the first `max_tokens` tokens of a prompt in its chat template; text that is
    cut is reported.

    Args:
        tokenizer: The tokenizer.
        text: The prompt, with what precedes and follows it.
        max_tokens: The number of tokens to keep.
        dropped: How many at the beginning are the template's.
        suffix: The template's end.
    """
    tokens = tokenizer([text], return_tensors="pt", verbose=False)
    ids = tokens["input_ids"][0].tolist()
    end = len(ids) - len(tokenizer(suffix).input_ids)
    if end > max_tokens:
        cut = tokenizer.decode(ids[max_tokens:end])
        limit = max_tokens - dropped
        report_long_prompt(LongPrompt("Qwen-Image", end - dropped, limit, cut))
    names = ("input_ids", "attention_mask")
    return {name: tokens[name][:, :max_tokens] for name in names}
