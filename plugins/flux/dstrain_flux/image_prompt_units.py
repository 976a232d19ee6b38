"""Units of the variants in which images take the place of a prompt, or stand beside it."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import convert_image, images_to_tensor
from PIL import Image
from torch import Tensor


class ImageTokens(TypedDict):
    """An image, encoded by SigLIP."""

    image_tokens: Tensor
    """(1, tokens, channels), the image encoder's dtype."""


class ReduxPrompt(TypedDict):
    """An image as T5 would encode its description."""

    redux_emb: Tensor
    """(1, tokens, channels), the dtype of `redux`."""


class ImageEmbeddings(TypedDict):
    """Images, encoded by SigLIP as one vector each."""

    image_embs: Tensor
    """(1, images, channels), the image encoder's dtype."""


@versioned(1)
def encode_redux_image(
    flux_redux_image: Image.Image,
    *,
    image_encoder: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> ImageTokens:
    """Encode an image as SigLIP's last hidden states."""
    pixels = square_pixels([flux_redux_image], image_encoder).to(device, dtype)
    return {"image_tokens": image_encoder(pixels).last_hidden_state}


@versioned(1)
def embed_redux_image(image_tokens: Tensor, *, redux: Any) -> ReduxPrompt:
    """Map SigLIP's tokens to those of a prompt, as FluxPriorReduxPipeline of diffusers
    does.
    """
    return {"redux_emb": redux(image_tokens).image_embeds}


@versioned(1)
def encode_ipadapter_images(
    ipadapter_images: list[Image.Image],
    *,
    image_encoder: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> ImageEmbeddings:
    """Encode images as SigLIP's pooled outputs."""
    pixels = square_pixels(ipadapter_images, image_encoder).to(device, dtype)
    # One by one: torch's attention rounds differently with others beside it and without.
    embeddings = [image_encoder(one[None]).pooler_output for one in pixels]
    return {"image_embs": torch.stack(embeddings, dim=1)}


def square_pixels(images: list[Image.Image], image_encoder: Any) -> Tensor:
    """Return images at the size of an image encoder, ignoring their aspect ratio, as
    (images, 3, side, side) fp32 in -1 to 1.
    """
    side = image_encoder.config.image_size
    resized = []
    for image in images:
        rgb = convert_image(image, "RGB")
        resized.append(rgb.resize((side, side), Image.Resampling.BICUBIC))
    return images_to_tensor(resized)
