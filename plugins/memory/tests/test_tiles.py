"""Tiles are set on VAEs of diffusers exactly, and what they change is bounded."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan
from dstrain_memory.tiles import Tiles
from torch import Tensor

SIDE = 96
"""Of the pictures, in pixels: four tiles of the sides below."""
TILES = Tiles(64, 64, 48, 48)


def kl() -> Any:
    blocks = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    return AutoencoderKL(
        3, 3, *blocks, (8, 8, 16, 16), latent_channels=16, norm_num_groups=4
    )


def video_vae(cls: Any) -> Any:
    return cls(base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1)


MOST = {
    AutoencoderKL: (0.7, 1.2),
    AutoencoderKLQwenImage: (0.2, 0.8),
    AutoencoderKLWan: (0.2, 0.8),
}
"""The most that tiles of random weights change of latents and of pixels. Statistics of
GroupNorm and attention are of a tile; in trained weights they are much alike."""
VAES = {
    "kl": kl,
    "qwen": lambda: video_vae(AutoencoderKLQwenImage),
    "wan": lambda: video_vae(AutoencoderKLWan),
}


@pytest.fixture(params=VAES)
def vae(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return VAES[request.param]().eval().requires_grad_(False)


def picture(vae: Any) -> Tensor:
    """A smooth picture, (1, 3, side, side) or of one frame."""
    noise = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    smooth = torch.nn.functional.interpolate(noise, SIDE, mode="bicubic").tanh()
    return smooth if isinstance(vae, AutoencoderKL) else smooth[:, :, None]


def difference(one: Tensor, other: Tensor) -> float:
    """Of two results, relative to the first."""
    assert one.shape == other.shape
    return float((one - other).norm() / one.norm())


def test_the_difference_that_tiles_make_is_measured_and_bounded(vae: Any) -> None:
    pixels = picture(vae)
    latents = vae.encode(pixels).latent_dist.mode()
    decoded = vae.decode(latents, return_dict=False)[0]
    TILES.apply(vae)
    tiled_latents = vae.encode(pixels).latent_dist.mode()
    tiled = vae.decode(latents, return_dict=False)[0]
    encoding, decoding = MOST[type(vae)]
    assert 0 < difference(latents, tiled_latents) < encoding
    assert 0 < difference(decoded, tiled) < decoding
    # Other sides give every pixel once, too.
    Tiles(72, 72, 56, 56).apply(vae)
    again = vae.encode(pixels).latent_dist.mode()
    assert again.shape == latents.shape
    assert vae.decode(again, return_dict=False)[0].shape == pixels.shape


def test_a_picture_within_a_tile_is_computed_as_without(vae: Any) -> None:
    pixels = picture(vae)[..., :64, :64]
    latents = vae.encode(pixels).latent_dist.mode()
    decoded = vae.decode(latents, return_dict=False)[0]
    Tiles(64, 64, 48, 48).apply(vae)
    assert torch.equal(vae.encode(pixels).latent_dist.mode(), latents)
    assert torch.equal(vae.decode(latents, return_dict=False)[0], decoded)


def test_the_fraction_of_overlap_is_exact() -> None:
    vae = kl()
    for size in (8, 72, 512, 1000, 1024):
        for stride in range(8, size + 1, 8):
            Tiles(size, size, stride, stride).apply(vae)
            assert int(size * (1 - vae.tile_overlap_factor)) == stride
            overlap = int(vae.tile_latent_min_size * vae.tile_overlap_factor)
            assert overlap == (size - stride) // 8
