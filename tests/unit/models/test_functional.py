"""Images, latents and patches in the shapes that networks read; damaged weights."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.image_processor import VaeImageProcessor
from dstrain import Pipeline
from dstrain.plugin.functional import (
    apply_guidance,
    as_uint8,
    images_to_tensor,
    latents_mean_std,
    pack,
    tensor_to_image,
    unpack,
)
from PIL import Image
from torch import nn

from tests.support.family import MODEL
from tests.support.stored_weights import halved


def noise_image(seed: int) -> Image.Image:
    numbers = np.random.default_rng(seed).integers(0, 256, (6, 10, 3), np.uint8)
    return Image.fromarray(numbers)


def test_images_are_signed_as_in_diffusers_and_come_back_exactly() -> None:
    images = [noise_image(0), noise_image(1)]
    pixels = images_to_tensor(images)
    theirs = VaeImageProcessor(vae_scale_factor=2).preprocess(images)
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, theirs)
    assert pixels.stride(1) == 1
    numbers = np.stack([np.array(one) for one in images])
    assert np.array_equal(as_uint8(pixels).numpy(), numbers)
    assert np.array_equal(np.array(tensor_to_image(pixels[:1])), numbers[0])


@pytest.mark.parametrize("axes", [2, 3])
def test_statistics_are_per_channel(axes: int) -> None:
    config = SimpleNamespace(latents_mean=[1.0, 2.0], latents_std=[3.0, 4.0])
    like = torch.zeros(5, 2, *[4] * axes, dtype=torch.float64)
    mean, std = latents_mean_std(config, like)
    assert mean.shape == std.shape == (1, 2, *[1] * axes)
    assert (mean.flatten().tolist(), std.flatten().tolist()) == ([1, 2], [3, 4])
    assert mean.dtype == std.dtype == torch.float64


def test_patches_are_those_of_diffusers_and_come_back() -> None:
    latents = torch.randn(2, 3, 4, 6)
    tokens = pack(latents)
    theirs = QwenImagePipeline._pack_latents(latents[:, None], 2, 3, 4, 6)
    assert torch.equal(tokens, theirs)
    assert torch.equal(unpack(tokens, 4, 6), latents)
    assert torch.equal(unpack(pack(latents, 1), 4, 6, 1), latents)


def test_guidance_goes_from_the_negative_through_the_positive() -> None:
    positive, negative = torch.tensor([2.0]), torch.tensor([1.0])
    found = [apply_guidance(positive, negative, scale) for scale in (0.0, 1.0, 3.0)]
    assert torch.cat(found).tolist() == [1.0, 2.0, 4.0]


def test_a_damaged_weight_is_named() -> None:
    """Also in what it is stored as."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    spec: Any = SimpleNamespace(unused_parameters={}, variant="base")
    pipeline = Pipeline(spec, MODEL, {"dit": module, "vae": nn.Linear(2, 2)})
    assert pipeline.damaged(["dit", "vae"]) == []
    module[1].weight[0] = float("inf")
    (found,) = pipeline.damaged(["dit", "vae"])
    assert " dit " in found and found.endswith(" 1.weight")
    module[1] = halved(module[1], module[1].weight * 0)
    module[1].scale.fill_(torch.nan)
    assert pipeline.damaged(["dit"])[0].endswith(" 1.scale")
