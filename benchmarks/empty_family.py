"""A family whose denoiser is one number, so that a training step costs what everything
around a denoiser costs.
"""

import hashlib
import json
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypedDict

import torch
from dstrain.plugin import (
    Column,
    Component,
    Files,
    FlowMatchSchedule,
    ModelFamily,
    PipelineSpec,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LATENTS = (1, 16, 1, 8, 8)
EMBEDDING = (1, 8, 32)


class Latents(TypedDict):
    """What stands for an image."""

    input_latents: Tensor


class Prompt(TypedDict):
    """What stands for a text."""

    prompt_emb: Tensor


class Empty(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, noisy_latents: Tensor) -> Tensor:
        """Return `noisy` times the parameter."""
        return noisy_latents * self.scale


def encode_prompt(prompt: str) -> Prompt:
    """Numbers that depend on the text."""
    return {"prompt_emb": _numbers(prompt, EMBEDDING)}


def encode_image(prompt: str) -> Latents:
    """Other numbers that depend on the text."""
    return {"input_latents": _numbers(prompt[::-1], LATENTS)}


def predict(
    noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, *, dit: Any
) -> Tensor:
    """Call the denoiser; the timestep and the text are not used."""
    prediction: Tensor = dit(noisy_latents)
    return prediction


def decode(latents: Tensor) -> Latents:
    """Nothing to decode."""
    return {"input_latents": latents}


def latent_shape() -> tuple[int, ...]:
    """Return the same shape always."""
    return LATENTS


PIPELINES = {
    "base": PipelineSpec(
        components=("dit",),
        units=(encode_prompt, encode_image),
        model_fn=predict,
        decoders=(decode,),
        inputs={"prompt": Column("prompt")},
        schedule=FlowMatchSchedule(),
        latent_shape=latent_shape,
        apply_guidance=lambda positive, negative, scale: positive,
        padded={"prompt_emb": 1},
    )
}


def install(folder: Path) -> Path:
    """Offer the family to this process as an installed plugin would be, and write its
    denoiser; returns that file.
    """
    about = folder / "plugin_empty-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plugin-empty\nVersion: 0\n"
    )
    (about / "entry_points.txt").write_text(
        "[dstrain.models]\nempty = empty_family:RECORD\n"
    )
    sys.path.append(str(folder))
    path = folder / "dit" / "model.safetensors"
    path.parent.mkdir()
    save_file(Empty().state_dict(), path)
    (path.parent / "config.json").write_text(json.dumps({}))
    return path


def _load(files: Files, configuration: Any, dtype: torch.dtype) -> nn.Module:
    module = Empty()
    module.load_state_dict(load_file(files.paths[0]))
    return module.to(dtype)


def _build(configuration: Any) -> nn.Module:
    return Empty()


def _numbers(text: str, shape: tuple[int, ...]) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


COMPONENTS = (
    Component(
        "dit", SimpleNamespace(load=_load, build=_build), "dit", key_patterns=("scale",)
    ),
)

RECORD = ModelFamily(
    api=2,
    name="empty",
    pipelines="empty_family:PIPELINES",
    components="empty_family:COMPONENTS",
    toy="",
    variants=("base",),
    default_trainable="dit",
    lora_targets=MappingProxyType({}),
    lora_prefixes=MappingProxyType({}),
)
