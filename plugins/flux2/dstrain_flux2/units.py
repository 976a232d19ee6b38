"""FLUX.2's units: prompt and images to conditions, and latents to an image."""

import math
from typing import Any, TypedDict

import torch
from dstrain.plugin import InputError, functional, versioned
from PIL import Image
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from dstrain_flux2.model_fn import DOWNSCALE

TOKENS = 512
"""Tokens of a filled chat template (src/flux2/text_encoder.py of black-forest-labs/flux2)."""
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses "
    "focusing on object relationships, object\nattribution and actions without speculation."
)
"""What Mistral is told first (src/flux2/system_messages.py there)."""


class Prompt(TypedDict):
    """An encoded prompt with its padding, since the denoiser knows no mask."""

    prompt_emb: Tensor
    """(1, 512, 3 * channels), the text encoder's dtype."""


class Latents(TypedDict):
    """An image as the denoiser sees it."""

    input_latents: Tensor
    """(1, 128, height / 16, width / 16), fp32."""


class EditLatents(TypedDict):
    """Reference images, each as an image is in `Latents`."""

    edit_latents: list[Tensor]


class DecodedImage(TypedDict):
    """A generated image."""

    image: Image.Image


@versioned(1)
def encode_mistral_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Encode a prompt, after a system message, as states of Mistral."""
    # Mistral's processor would take this mark for an image.
    told = prompt.replace("[IMG]", "")
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("system", SYSTEM_MESSAGE), ("user", told))
    ]
    tokens = tokenize(tokenizer, "[INST]", told, messages)
    return take_states(tokens.to(device), text_encoder)


@versioned(1)
def encode_qwen_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Encode a prompt, and an answer begun without thoughts, as states of Qwen3."""
    messages = [{"role": "user", "content": prompt}]
    options = {"add_generation_prompt": True, "enable_thinking": False}
    tokens = tokenize(tokenizer, "<|im_start|>", prompt, messages, **options)
    return take_states(tokens.to(device), text_encoder)


@versioned(1)
def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image, its sides multiples of 16."""
    return {"input_latents": encode_with_vae(input_image, vae, device, dtype)}


@versioned(1)
def encode_edit_images(
    edit_image: list[Image.Image],
    edit_pixels: int,
    single_edit_pixels: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> EditLatents:
    """Encode reference images of any sizes; a single one may be larger."""
    most = single_edit_pixels if len(edit_image) == 1 else edit_pixels
    given = (vae, device, dtype)
    found = [encode_with_vae(resize(image, most), *given) for image in edit_image]
    return {"edit_latents": found}


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 128, height / 16, width / 16), to an RGB image."""
    mean, deviation = statistics(vae)
    own = pixel_shuffle(latents.to(vae.device, torch.float32) * deviation + mean, 2)
    pixels = vae.decode(own.to(vae.dtype), return_dict=False)[0]
    return {"image": functional.tensor_to_image(pixels)}


def resize(image: Image.Image, most: int) -> Image.Image:
    """Return an RGB image scaled down to an area, if it is larger, and cropped around its
    middle to multiples of 16 (default_prep of black-forest-labs/flux2); raises InputError.
    """
    scale = min(1, math.sqrt(most / (image.width * image.height)))
    size = int(image.width * scale), int(image.height * scale)
    width, height = (side // DOWNSCALE * DOWNSCALE for side in size)
    if not width * height:
        what = f"is too narrow: {image.width} x {image.height}"
        raise InputError("edit_image", what, f"give sides of {DOWNSCALE} or more")
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    scaled = image.resize(size, Image.Resampling.LANCZOS)
    return scaled.crop((left, top, left + width, top + height))


def edited_size(images: list[Image.Image]) -> dict[str, int]:
    """Return the sides of the first image, within a megapixel: diffusers' default."""
    width, height = resize(images[0], 1024**2).size
    return {"height": height, "width": width}


def encode_with_vae(
    image: Image.Image, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the mode of the VAE's distribution of an RGB image, in normalized patches."""
    pixels = functional.images_to_tensor([image]).to(device, dtype)
    mode: Tensor = vae.encode(pixels).latent_dist.mode().float()
    mean, deviation = statistics(vae)
    return (pixel_unshuffle(mode, 2) - mean) / deviation


def statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the channels of patches, (1, 128, 1, 1) fp32."""
    mean, variance = vae.bn.running_mean.float(), vae.bn.running_var.float()
    deviation = torch.sqrt(variance + vae.config.batch_norm_eps)
    return mean.view(1, -1, 1, 1), deviation.view(1, -1, 1, 1)


def tokenize(
    tokenizer: Any, mark: str, prompt: str, messages: Any, **options: bool
) -> Any:
    """Return the tokens of messages, one of which has the prompt, in the chat template;
    raises InputError for a template without a mark of the published one.
    """
    if mark not in str(tokenizer.chat_template):
        what = f"the chat template of {tokenizer.name_or_path} has no {mark}"
        raise InputError("tokenizer", what, "give the model's with --tokenizer_path")
    filled = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    start = filled[: filled.find(prompt)]
    before = tokenizer(start, add_special_tokens=False).input_ids
    limit = TOKENS - len(before) + tokenizer.num_special_tokens_to_add()
    functional.check_length(tokenizer, prompt, limit, "FLUX.2")
    return tokenizer(
        [filled],
        add_special_tokens=False,
        padding="max_length",
        max_length=TOKENS,
        truncation=True,
        return_tensors="pt",
    )


def take_states(tokens: Any, text_encoder: Any) -> Prompt:
    """Return the states after a quarter, a half and three quarters of the layers: 10, 20
    and 30 of Mistral's 40, 9, 18 and 27 of Qwen3's 36.
    """
    # Without the head, which would compute a score for each word of the vocabulary.
    given = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    made = text_encoder.model(**given, use_cache=False, output_hidden_states=True)
    depth = text_encoder.config.get_text_config().num_hidden_layers
    chosen = [made.hidden_states[depth * quarter // 4] for quarter in (1, 2, 3)]
    return {"prompt_emb": torch.cat(chosen, dim=-1)}
