"""Qwen-Image's units: prompt and picture -> what the denoiser reads, and latents -> picture."""

from typing import Any, TypedDict

import numpy as np
import torch
from dstrain.errors import UsageError
from PIL import Image
from torch import Tensor

PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 34
"""Tokens of PREFIX, whose embeddings are dropped (QwenImagePipeline of diffusers, `prompt_template_encode`)."""
MAX_TOKENS = 4096
"""Tokens of a prompt and SUFFIX that are kept."""


class Prompt(TypedDict):
    """A prompt as the denoiser reads it."""

    prompt_emb: Tensor
    """(1, tokens, channels), the text encoder's dtype."""
    prompt_mask: Tensor
    """(1, tokens), bool."""


class Latents(TypedDict):
    """A picture in the VAE's latent space, normalised per channel."""

    input_latents: Tensor
    """(1, 16, 1, height / 8, width / 8), fp32."""


class Picture(TypedDict):
    """A generated picture."""

    image: Image.Image


def encode_prompt(prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device) -> Prompt:
    """Text -> the text encoder's last hidden states, without those of the chat template's prefix.

    Raises UsageError when the tokenizer does not turn the prefix into 34 tokens: it is then another model's.
    """
    found = len(tokenizer(PREFIX).input_ids)
    if found != PREFIX_TOKENS:
        what = f"turns the chat template's prefix into {found} tokens, want {PREFIX_TOKENS}"
        raise UsageError(
            f"tokenizer {tokenizer.name_or_path}", what, "give Qwen-Image's tokenizer with --tokenizer_path"
        )
    text = PREFIX + prompt + SUFFIX
    tokens = tokenizer([text], max_length=PREFIX_TOKENS + MAX_TOKENS, truncation=True, return_tensors="pt").to(device)
    # The language model alone: its head would compute a score for each of 152,064 words, which nothing reads.
    outputs = text_encoder.model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False)
    return {
        "prompt_emb": outputs.last_hidden_state[:, PREFIX_TOKENS:],
        "prompt_mask": tokens.attention_mask[:, PREFIX_TOKENS:].bool(),
    }


def encode_image(input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype) -> Latents:
    """RGB picture -> the mode of the VAE's distribution, normalised in fp32; sides are multiples of 16."""
    pixels = torch.from_numpy(np.array(input_image)).permute(2, 0, 1).to(device, torch.float32) / 255 * 2 - 1
    mode = vae.encode(pixels[None, :, None].to(dtype)).latent_dist.mode().float()
    mean, std = _statistics(vae.config, mode)
    return {"input_latents": (mode - mean) / std}


def decode(latents: Tensor, *, vae: Any) -> Picture:
    """Latents, (1, 16, 1, height / 8, width / 8) -> RGB picture."""
    latents = latents.to(vae.device, torch.float32)
    mean, std = _statistics(vae.config, latents)
    # Not latents * std: diffusers divides, and then the pixels are equal, too.
    pixels = vae.decode((latents / (1 / std) + mean).to(vae.dtype), return_dict=False)[0][0, :, 0].float()
    values = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return {"image": Image.fromarray(values.permute(1, 2, 0).cpu().numpy())}


def _statistics(vae_config: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents, each (1, channels, 1, 1, 1)."""
    mean, std = (
        like.new_tensor(numbers).view(1, -1, 1, 1, 1) for numbers in (vae_config.latents_mean, vae_config.latents_std)
    )
    return mean, std
