"""A model of toy sizes with random weights, written as the published model is laid out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import write_model

from .components import COMPONENTS

# Dropout in the text encoder, so that one left in training mode is noticed.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "dit": {"channels": 4, "width": 16, "depth": 2, "text_width": 16},
    "text_encoder": {"width": 16, "dropout": 0.1},
    "vae": {"channels": 4, "side": 8},
}


def write(
    folder: Path,
    variant: str = "base",
    seed: int = 0,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a toy of `variant` to `folder`; equal arguments write equal files.

    sizes: component -> entries of its config.json that replace the toy's own.
    """
    write_model(folder, COMPONENTS, SIZES, sizes, seed)
