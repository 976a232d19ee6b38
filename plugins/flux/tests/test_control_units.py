"""What second images become: masks and masked images are those of diffusers."""

from typing import Any

import numpy as np
import torch
from diffusers import FluxFillPipeline
from dstrain.models import pack
from dstrain_flux.control_units import binary_mask, encode_fill
from PIL import Image


def noise(mode: str, width: int, height: int) -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


def test_a_mask_is_white_from_half_grey_on_at_any_size() -> None:
    halves = Image.new("L", (32, 16), 127)
    halves.paste(128, (16, 0, 32, 16))
    mask = binary_mask(halves, 16, 32)
    assert mask.shape == (1, 1, 16, 32)
    assert not mask[..., :16].any() and mask[..., 16:].all()
    assert binary_mask(noise("L", 30, 20), 32, 48).shape == (1, 1, 32, 48)


def test_masks_are_packed_as_by_diffusers_and_masked_pixels_are_not_seen(
    loaded: dict[str, Any],
) -> None:
    parts = {name: loaded[name] for name in ("vae", "device", "dtype")}
    image, mask = noise("RGB", 48, 32), noise("L", 48, 32)
    made = encode_fill(image, mask, 32, 48, **parts)
    published = FluxFillPipeline(*[None] * 7).mask_processor
    binary = published.preprocess(mask, height=32, width=48)
    pixels = np.array(image)
    theirs, _ = FluxFillPipeline.prepare_mask_latents(
        _Published(loaded["vae"]), binary, torch.zeros(1, 16, 4, 6), 1, 16, 1, 32, 48,
        torch.float32, torch.device("cpu"), None,
    )  # fmt: skip
    assert torch.equal(pack(made["fill_mask"].float()), theirs)
    pixels[binary[0, 0].bool().numpy()] = 7
    changed = encode_fill(Image.fromarray(pixels), mask, 32, 48, **parts)
    assert torch.equal(changed["fill_latents"], made["fill_latents"])
    assert not torch.equal(
        encode_fill(image, Image.new("L", (48, 32)), 32, 48, **parts)["fill_latents"],
        made["fill_latents"],
    )


class _Published:
    """What `prepare_mask_latents` reads of its pipeline."""

    vae_scale_factor = 8
    _pack_latents = staticmethod(FluxFillPipeline._pack_latents)

    def __init__(self, vae: Any) -> None:
        self.vae = vae
