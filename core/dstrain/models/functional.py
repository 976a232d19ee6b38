"""Tensor functions: pixels, latents, patches and guidance, which families share, and values
that are no numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dstrain.errors import Diverged, UsageError


@contextmanager
def override_positional_args(module: nn.Module, *exact: Tensor) -> Iterator[None]:
    """Replace the first positional arguments of calls of a module by `exact`.

    For the module that embeds timesteps: diffusers' transformers round them, (batch,)
    fp32, to the dtype of the hidden states before they call it, and in bf16 the
    timesteps 500 and 501 are then equal.
    """

    def replaced(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*exact, *arguments[len(exact) :])

    handle = module.register_forward_pre_hook(replaced)
    try:
        yield
    finally:
        handle.remove()


def images_to_tensor(images: Sequence[Image.Image]) -> Tensor:
    """Convert RGB images of one size to (images, 3, height, width) fp32 in -1 to 1.

    Channels are innermost in memory, as in diffusers' pipelines: convolutions of
    another memory format round differently.
    """
    pixels = np.stack([np.array(image) for image in images])
    return to_minus_one_one(torch.from_numpy(pixels))


def to_minus_one_one(pixels: Tensor) -> Tensor:
    """Convert uint8 (frames, height, width, 3) to fp32 (frames, 3, ...) in -1 to 1."""
    return pixels.permute(0, 3, 1, 2).float() / 255 * 2 - 1


def as_uint8(pixels: Tensor) -> Tensor:
    """Convert (frames, 3, height, width) in -1 to 1 to uint8 (frames, height, width, 3)
    on the CPU; values outside are clamped. Raises Diverged for NaN and infinity, which
    would be black or white.
    """
    if not pixels.isfinite().all():
        raise Diverged("decoder", "an image contains NaN or infinity")
    scaled = (pixels.float() / 2 + 0.5).clamp(0, 1) * 255
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


def tensor_to_image(pixels: Tensor) -> Image.Image:
    """Convert (1, 3, height, width) in -1 to 1 to an RGB image."""
    return Image.fromarray(as_uint8(pixels)[0].numpy())


def latents_mean_std(vae_config: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, (1, channels, 1, ...), from
    a VAE's configuration.

    Args:
        vae_config: Has `latents_mean` and `latents_std`, lists of a number per channel.
        like: Latents, (batch, channels, ...), whose dtype, device and number of axes
            they get.
    """
    axes = like.ndim - 2
    shape = (1, -1, *[1] * axes)
    mean = like.new_tensor(vae_config.latents_mean).view(shape)
    return mean, like.new_tensor(vae_config.latents_std).view(shape)


def check_sides(height: int, width: int, multiple: int) -> None:
    """Refuse a height or width in pixels that is not a positive multiple.

    Raises UsageError naming the nearest multiple.
    """
    for name, size in (("height", height), ("width", width)):
        if size <= 0 or size % multiple:
            near = max(1, round(size / multiple)) * multiple
            what = f"expected a multiple of {multiple}, got {size}"
            raise UsageError(name, f"{what}; the nearest is {near}")


def pack(latents: Tensor, patch: int = 2) -> Tensor:
    """Convert latents, (batch, channels, height, width), to one token per patch,
    (batch, tokens, channels * patch * patch).
    """
    batch, channels, height, width = latents.shape
    rows = height // patch
    columns = width // patch
    patches = latents.reshape(batch, channels, rows, patch, columns, patch)
    # To (batch, rows, columns, channels, patch, patch).
    patches = patches.permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows * columns, channels * patch**2)


def unpack(tokens: Tensor, height: int, width: int, patch: int = 2) -> Tensor:
    """Convert tokens of `pack` to latents, (batch, channels, height, width)."""
    batch = len(tokens)
    rows = height // patch
    columns = width // patch
    patches = tokens.reshape(batch, rows, columns, -1, patch, patch)
    # To (batch, channels, rows, patch, columns, patch).
    patches = patches.permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, -1, height, width)


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Apply classifier-free guidance (Ho and Salimans 2022): extrapolate from the
    negative prediction through the positive one.
    """
    return negative + scale * (positive - negative)


def has_nan(value: Any) -> bool:
    """Return whether a tensor in a value, which may be a list or record, contains NaN.

    Infinity is a number that masks of attention have.
    """
    # Slow to import, and only stage 1 asks.
    from accelerate.utils.operations import recursively_apply

    found: list[bool] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(bool(_comparable(tensor).isnan().any()))
        return tensor

    recursively_apply(note, value)
    return any(found)


def damaged_weight(module: nn.Module) -> str:
    """Return the name of a weight with NaN or infinity; '' without any."""
    # Scales of stored weights are buffers that no state dict has.
    for name, weight in (*module.state_dict().items(), *module.named_buffers()):
        if isinstance(weight, Tensor) and not _comparable(weight).isfinite().all():
            return name
    return ""


def _comparable(tensor: Tensor) -> Tensor:
    # torch does not compare numbers of 8 bits.
    is_small = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.float() if is_small else tensor
