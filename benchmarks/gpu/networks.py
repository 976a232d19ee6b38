"""Denoisers at published widths, filled with random weights on the device, each weight
stored as it is made: no more than one is ever whole in bf16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch
from dstrain.models import components_of, empty_component
from dstrain.models.placing import Place, place_buffers, put
from dstrain.registry import load_family
from torch import Tensor, nn

STD = 0.02
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Workload:
    """A family's denoiser and a sample of it."""

    family: str
    variant: str
    published: str
    """The published model whose configuration it has."""
    tiny: Mapping[str, Any]
    """Entries of the configuration for a try on a CPU."""
    depth: tuple[str, ...]
    """The entries that say how many blocks there are."""
    tokens: int
    """Tokens of an image of 1024 x 1024, or of 81 frames of 480p."""
    text: int
    values: Callable[["Workload", Any, int, int], dict[str, Tensor]]
    """(workload, configuration, tokens, tokens of text) -> the cached values of a
    sample, on the CPU."""


def _qwen_image(_: Workload, config: Any, tokens: int, text: int) -> dict[str, Tensor]:
    side = 2 * isqrt(tokens)
    return {
        "input_latents": torch.randn(1, 16, 1, side, side),
        "prompt_emb": torch.randn(1, text, config.joint_attention_dim, dtype=DTYPE),
        "prompt_mask": torch.ones(1, text, dtype=torch.bool),
    }


def _flux(_: Workload, config: Any, tokens: int, text: int) -> dict[str, Tensor]:
    side = 2 * isqrt(tokens)
    return {
        "input_latents": torch.randn(1, 16, side, side),
        "prompt_emb": torch.randn(1, text, config.joint_attention_dim, dtype=DTYPE),
        "pooled_emb": torch.randn(1, config.pooled_projection_dim, dtype=DTYPE),
    }


def _wan(_: Workload, config: Any, tokens: int, text: int) -> dict[str, Tensor]:
    frames = 21 if tokens > 4096 else 3
    height = 2 * isqrt(tokens // frames)
    width = 2 * max(1, tokens // frames // (height // 2))
    return {
        "input_latents": torch.randn(1, config.in_channels, frames, height, width),
        "prompt_emb": torch.randn(1, text, config.text_dim, dtype=DTYPE),
    }


WORKLOADS = {
    "qwen_image": Workload(
        family="qwen_image",
        variant="base",
        published="Qwen/Qwen-Image",
        tiny={
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        depth=("num_layers",),
        tokens=4096,
        text=256,
        values=_qwen_image,
    ),
    "flux": Workload(
        family="flux",
        variant="dev",
        published="black-forest-labs/FLUX.1-dev",
        tiny={
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        depth=("num_layers", "num_single_layers"),
        tokens=4096,
        text=512,
        values=_flux,
    ),
    "wan": Workload(
        family="wan",
        variant="t2v",
        published="Wan-AI/Wan2.1-T2V-14B",
        tiny={
            "num_layers": 2,
            "attention_head_dim": 12,
            "num_attention_heads": 2,
            "text_dim": 32,
            "ffn_dim": 64,
        },
        depth=("num_layers",),
        tokens=32760,
        text=512,
        values=_wan,
    ),
}

WORKLOADS["wan_1.3b"] = replace(WORKLOADS["wan"], published="Wan-AI/Wan2.1-T2V-1.3B")


def configuration(workload: Workload, layers: int, tiny: bool) -> dict[str, Any]:
    """Return the content of config.json with this many blocks; 0 keeps them all."""
    family = load_family(workload.family)
    component = components_of(family)[family.default_trainable]
    content = dict(component.published[workload.published])
    if tiny:
        content |= workload.tiny
    for index, name in enumerate(workload.depth):
        if layers:
            # FLUX has two blocks of the second kind for one of the first.
            content[name] = layers * (index + 1)
    return content


def build(
    workload: Workload, content: Mapping[str, Any], device: torch.device, store: Place
) -> tuple[nn.Module, int]:
    """Build the denoiser and fill it with random weights; return it, frozen, with the
    number of its parameters.

    Args:
        workload: The family.
        content: The content of its config.json.
        device: The device to make weights on.
        store: Stores a weight in the place of its layer.
    """
    family = load_family(workload.family)
    component = components_of(family)[family.default_trainable]
    network = empty_component(component, content)
    assert network is not None
    count = sum(weight.numel() for weight in network.parameters())
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in network.state_dict().items():
        made = torch.empty(weight.shape, dtype=DTYPE, device=device)
        if weight.ndim > 1:
            made.normal_(0, STD, generator=generator)
        else:
            made.fill_(float(name.endswith("weight")))
        put(network, name, store(network, name, made))
        del made
    place_buffers(network, device)
    return network.requires_grad_(False).eval(), count
