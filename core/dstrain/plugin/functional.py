"""Tensor functions that families share: pixel conversion, latent normalization,
patching, guidance, adapters, blocks and stored layers.
"""

from dstrain.data.images import (
    convert as convert_image,
    cover as cover_image,
    white_pixels,
)
from dstrain.graph import LongPrompt
from dstrain.graph.long_prompts import check_length, report_long_prompt
from dstrain.models import StoredLinear, empty_component
from dstrain.models.execution import around_blocks, checkpoint_through, repeated_blocks
from dstrain.models.functional import (
    apply_guidance,
    as_uint8,
    check_sides,
    images_to_tensor,
    latents_mean_std,
    override_positional_args,
    pack,
    tensor_to_image,
    to_minus_one_one,
    unpack,
)

__all__ = (
    "LongPrompt",
    "StoredLinear",
    "apply_guidance",
    "around_blocks",
    "as_uint8",
    "check_length",
    "check_sides",
    "checkpoint_through",
    "convert_image",
    "cover_image",
    "empty_component",
    "images_to_tensor",
    "latents_mean_std",
    "override_positional_args",
    "pack",
    "repeated_blocks",
    "report_long_prompt",
    "tensor_to_image",
    "to_minus_one_one",
    "unpack",
    "white_pixels",
)
