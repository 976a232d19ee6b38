"""FLUX's units: prompt and pictures -> what the denoiser reads, and latents -> picture."""

import math
from typing import Any, TypedDict

import torch
from dstrain.plugin.functional import convert_image, images_to_tensor, tensor_to_image
from PIL import Image
from torch import Tensor

from dstrain_flux.model_fn import DOWNSCALE, PATCH

CLIP_TOKENS = 77
T5_TOKENS = 512
KONTEXT_PIXELS = 1024 * 1024
"""Area of each of KONTEXT_SIZES, about."""
KONTEXT_SIZES = (
    *(
        (672, 1568),
        (688, 1504),
        (720, 1456),
        (752, 1392),
        (800, 1328),
        (832, 1248),
        (880, 1184),
        (944, 1104),
    ),
    (1024, 1024),
    *(
        (1104, 944),
        (1184, 880),
        (1248, 832),
        (1328, 800),
        (1392, 752),
        (1456, 720),
        (1504, 688),
        (1568, 672),
    ),
)
"""(width, height) of the pictures Kontext was trained on (diffusers'
PREFERRED_KONTEXT_RESOLUTIONS).
"""


class Pooled(TypedDict):
    """A prompt as CLIP sums it up."""

    pooled_emb: Tensor
    """(1, channels), the text encoder's dtype."""


class Prompt(TypedDict):
    """A prompt as T5 reads it, padding included: the denoiser knows no mask."""

    prompt_emb: Tensor
    """(1, 512, channels), the text encoder's dtype."""


class Latents(TypedDict):
    """A picture in the VAE's latent space, normalised."""

    input_latents: Tensor
    """(1, 16, height / 8, width / 8), fp32."""


class KontextImages(TypedDict):
    """The pictures to edit, RGB, at sizes the denoiser knows."""

    kontext_pictures: list[Image.Image]


class KontextLatents(TypedDict):
    """The pictures to edit in the VAE's latent space, normalised."""

    kontext_latents: list[Tensor]
    """Each (1, 16, height / 8, width / 8), fp32."""


class DecodedImage(TypedDict):
    """A generated picture."""

    image: Image.Image


def encode_clip(
    prompt: str, *, text_encoder_1: Any, tokenizer_1: Any, device: torch.device
) -> Pooled:
    """Text -> CLIP's state at its end, of 77 tokens at most."""
    return {
        "pooled_emb": text_encoder_1(
            _tokens(prompt, tokenizer_1, CLIP_TOKENS).to(device)
        ).pooler_output
    }


def encode_prompt(
    prompt: str, *, text_encoder_2: Any, tokenizer_2: Any, device: torch.device
) -> Prompt:
    """Text -> T5's last hidden states of 512 tokens, of which those after the text are
    padding.
    """
    return {
        "prompt_emb": text_encoder_2(
            _tokens(prompt, tokenizer_2, T5_TOKENS).to(device)
        ).last_hidden_state
    }


def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """RGB picture -> the mode of the VAE's distribution, normalised in fp32; sides are
    multiples of 16.
    """
    return {"input_latents": _encode(input_image, vae, device, dtype)}


def resize_kontext(
    kontext_images: list[Image.Image], kontext_pixels: int
) -> KontextImages:
    """Pictures of any size -> RGB pictures of about `kontext_pixels` pixels, as
    `kontext_size` says.
    """
    sizes = [kontext_size(*image.size, kontext_pixels) for image in kontext_images]
    resized = [
        convert_image(image, "RGB").resize(size, Image.Resampling.LANCZOS)
        for image, size in zip(kontext_images, sizes, strict=True)
    ]
    return {"kontext_pictures": resized}


def encode_kontext(
    kontext_pictures: list[Image.Image],
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> KontextLatents:
    """RGB pictures -> latents, each as `encode_image` makes them."""
    return {
        "kontext_latents": [
            _encode(image, vae, device, dtype) for image in kontext_pictures
        ]
    }


def kontext_size(width: int, height: int, pixels: int) -> tuple[int, int]:
    """(width, height) of the published size nearest in shape, scaled to an area;
    multiples of 16.

    For the published area this is what FluxKontextPipeline of diffusers does.
    """
    multiple = DOWNSCALE * PATCH
    ratio = max(width // multiple, 1) / max(height // multiple, 1)
    near = min(KONTEXT_SIZES, key=lambda size: abs(ratio - size[0] / size[1]))
    scale = math.sqrt(pixels / KONTEXT_PIXELS) / multiple
    return max(round(near[0] * scale), 1) * multiple, max(
        round(near[1] * scale), 1
    ) * multiple


def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Latents, (1, 16, height / 8, width / 8) -> RGB picture."""
    plain = (
        latents.to(vae.device, torch.float32) / vae.config.scaling_factor
        + vae.config.shift_factor
    )
    return {
        "image": tensor_to_image(vae.decode(plain.to(vae.dtype), return_dict=False)[0])
    }


def _tokens(prompt: str, tokenizer: Any, length: int) -> Tensor:
    """Ids of a prompt cut or padded to a length: (1, length)."""
    tokens = tokenizer(
        [prompt],
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    )
    ids: Tensor = tokens.input_ids
    return ids


def _encode(
    image: Image.Image, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    mode: Tensor = (
        vae.encode(images_to_tensor([image]).to(device, dtype))
        .latent_dist.mode()
        .float()
    )
    return (mode - vae.config.shift_factor) * vae.config.scaling_factor
