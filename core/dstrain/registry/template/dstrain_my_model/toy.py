"""A model of toy sizes with random weights, written as the published model is laid out."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from .networks import Denoiser, TextEncoder, Vae

# Dropout in the text encoder, so that one left in training mode is noticed.
NETWORKS = MappingProxyType(
    {
        "dit": (
            "transformer",
            Denoiser,
            MappingProxyType(
                {"channels": 4, "width": 16, "depth": 2, "text_width": 16}
            ),
        ),
        "text_encoder": (
            "text_encoder",
            TextEncoder,
            MappingProxyType({"width": 16, "dropout": 0.1}),
        ),
        "vae": ("vae", Vae, MappingProxyType({"channels": 4, "side": 8})),
    }
)
"""Component -> its folder, its class, and arguments of its constructor."""


def write(
    folder: Path,
    variant: str = "base",
    seed: int = 0,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a toy of `variant` to `folder`; equal arguments write equal files.

    sizes: component -> arguments of its class's constructor that replace the toy's own.
    """
    for name, (place, network, entries) in NETWORKS.items():
        given = {**entries, **(sizes or {}).get(name, {})}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weights = network(**given).state_dict()
        (folder / place).mkdir(parents=True)
        (folder / place / "config.json").write_text(json.dumps(given, indent=2) + "\n")
        save_file(
            weights, folder / place / "model.safetensors", metadata={"format": "pt"}
        )
