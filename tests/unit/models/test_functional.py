"""Images and latents in the shapes that networks read, and arguments that stay exact."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.image_processor import VaeImageProcessor
from dstrain import UsageError
from dstrain.models import check_sides, override_positional_args, pack, unpack
from dstrain.models.functional import (
    apply_guidance,
    as_uint8,
    images_to_tensor,
    latents_mean_std,
    tensor_to_image,
    to_minus_one_one,
)
from PIL import Image
from torch import Tensor, nn


class Sum(nn.Module):
    """Adds its arguments."""

    def forward(self, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        return first + second + third


def test_the_first_arguments_are_replaced_and_the_others_kept() -> None:
    module, one = Sum(), torch.ones(1)
    with override_positional_args(module, 10 * one):
        assert module(one, one, one).item() == 12
    with override_positional_args(module, 10 * one, 100 * one):
        assert module(one, one, one).item() == 111
    assert module(one, one, one).item() == 3


def test_what_would_be_rounded_arrives_as_it_is() -> None:
    module, exact = Sum(), torch.tensor([501.0])
    rounded = exact.bfloat16()
    zero = torch.zeros(1)
    with override_positional_args(module, exact):
        assert module(rounded, zero, zero).item() == 501.0 != rounded.item()


def test_nothing_is_left_behind_even_after_an_error() -> None:
    module = Sum()
    with pytest.raises(RuntimeError), override_positional_args(module, torch.ones(1)):
        raise RuntimeError
    assert not module._forward_pre_hooks


def noise_image(seed: int, height: int = 6, width: int = 10) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    )


def test_images_are_signed_as_in_diffusers_and_come_back_exactly() -> None:
    images = [noise_image(0), noise_image(1)]
    pixels = images_to_tensor(images)
    theirs = VaeImageProcessor(vae_scale_factor=2).preprocess(images)
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, theirs)
    assert pixels.stride(1) == 1
    assert torch.equal(
        as_uint8(pixels),
        torch.from_numpy(np.stack([np.array(one) for one in images])),
    )
    assert np.array_equal(np.array(tensor_to_image(pixels[:1])), np.array(images[0]))


def test_every_value_of_a_pixel_comes_back_and_what_is_beyond_is_cut() -> None:
    values = (
        torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    )
    assert torch.equal(as_uint8(to_minus_one_one(values)), values)
    assert as_uint8(torch.full((1, 3, 1, 1), 1.7)).unique().tolist() == [255]
    assert as_uint8(torch.full((1, 3, 1, 1), -9.0)).unique().tolist() == [0]


@pytest.mark.parametrize("axes", [2, 3])
def test_statistics_are_per_channel(axes: int) -> None:
    config = SimpleNamespace(latents_mean=[1.0, 2.0], latents_std=[3.0, 4.0])
    mean, std = latents_mean_std(
        config, torch.zeros(5, 2, *[4] * axes, dtype=torch.float64)
    )
    assert mean.shape == std.shape == (1, 2, *[1] * axes)
    assert (mean.flatten().tolist(), std.flatten().tolist(), std.dtype) == (
        [1.0, 2.0],
        [3.0, 4.0],
        torch.float64,
    )


def test_patches_are_those_of_diffusers_and_come_back() -> None:
    latents = torch.randn(2, 3, 4, 6)
    tokens = pack(latents)
    assert torch.equal(
        tokens, QwenImagePipeline._pack_latents(latents[:, None], 2, 3, 4, 6)
    )
    assert torch.equal(unpack(tokens, 4, 6), latents)


@pytest.mark.parametrize(
    ("height", "width", "name"),
    [(40, 32, "height"), (32, 0, "width"), (-16, 16, "height")],
)
def test_a_side_that_is_no_multiple_is_refused_by_name(
    height: int, width: int, name: str
) -> None:
    check_sides(32, 48, 16)
    with pytest.raises(UsageError, match=f"{name}: expected a multiple of 16"):
        check_sides(height, width, 16)


def test_guidance_goes_from_the_negative_through_the_positive() -> None:
    positive, negative = torch.tensor([2.0]), torch.tensor([1.0])
    assert [
        apply_guidance(positive, negative, scale).item() for scale in (0.0, 1.0, 3.0)
    ] == [
        1.0,
        2.0,
        4.0,
    ]
