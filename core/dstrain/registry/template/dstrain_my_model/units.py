"""Units: encode a prompt and an image, and decode latents."""

from typing import Any, TypedDict

import torch
from dstrain.plugin.functional import images_to_tensor, tensor_to_image
from PIL import Image
from torch import Tensor


class Prompt(TypedDict):
    """A prompt as the denoiser reads it."""

    prompt_emb: Tensor
    """(1, bytes, channels), the text encoder's dtype."""
    prompt_mask: Tensor
    """(1, bytes), bool."""


class Latents(TypedDict):
    """An image in the VAE's latent space."""

    input_latents: Tensor
    """(1, channels, height / 8, width / 8), fp32."""


class DecodedImage(TypedDict):
    """A generated image."""

    image: Image.Image


def encode_prompt(prompt: str, *, text_encoder: Any, device: torch.device) -> Prompt:
    """Encode text as one vector per byte, after one that marks the start."""
    ids = torch.tensor([[0, *prompt.encode()]], device=device)
    return {
        "prompt_emb": text_encoder(ids),
        "prompt_mask": torch.ones_like(ids, dtype=torch.bool),
    }


def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image whose height and width are multiples of 8."""
    return {
        "input_latents": vae.encoder(
            images_to_tensor([input_image]).to(device, dtype)
        ).float()
    }


def decode(latents: Tensor, *, vae: Any, dtype: torch.dtype) -> DecodedImage:
    """Decode latents, (1, channels, height / 8, width / 8), to an RGB image."""
    return {"image": tensor_to_image(vae.decoder(latents.to(dtype)))}
