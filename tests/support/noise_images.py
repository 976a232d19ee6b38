"""Images of noise, the same for the same seed."""

import numpy as np
from PIL import Image


def noise_image(
    width: int, height: int, seed: int = 0, channels: int = 3
) -> Image.Image:
    """Return an image in which every pixel is noise."""
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (height, width, channels), np.uint8))


def smooth_noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image with one value of noise for 8 x 8 pixels, and smooth between."""
    coarse = noise_image(width // 8 or 1, height // 8 or 1, seed)
    return coarse.resize((width, height), Image.Resampling.BICUBIC)
