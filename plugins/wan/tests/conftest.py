"""One toy model per variant, written once, and its components as this plugin loads
them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain.models import recognize
from dstrain.plugin import Files
from dstrain_wan import MODEL
from dstrain_wan.components import COMPONENTS
from dstrain_wan.toy import write
from PIL import Image

BY_NAME = {component.name: component for component in COMPONENTS}


def load(
    folder: Path, variant: str, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Load every component of a variant's toy, and its configuration as units use
    it.
    """
    loaded: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype}
    for name in MODEL.spec(variant).components:
        component = BY_NAME[name]
        place = folder / component.folders[0]
        configuration = None
        if not component.is_folder:
            configuration = component.configure(
                json.loads((place / "config.json").read_text())
            )
            loaded[f"{name}_config"] = configuration
        files = Files((place,))
        if not component.is_folder:
            ((_, files),) = recognize(
                Files(tuple(sorted(place.glob("*.safetensors")))), COMPONENTS
            )
        loaded[name] = component.network.load(files, configuration, dtype)
        if isinstance(loaded[name], torch.nn.Module):
            loaded[name].requires_grad_(False)
    return loaded


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Variant -> folder of its toy."""
    folders = {
        variant: tmp_path_factory.mktemp("toy") / variant for variant in MODEL.variants
    }
    for variant, folder in folders.items():
        write(folder, variant)
    return folders


@pytest.fixture
def bind_components(toys: Mapping[str, Path]) -> Callable[..., dict[str, Any]]:
    """Load fresh components of a variant, in fp32 or the dtype given."""
    return lambda variant, dtype=torch.float32: load(toys[variant], variant, dtype)


@pytest.fixture(scope="session")
def image() -> Image.Image:
    """An image of 72 x 56 pixels, none of whose sides is a multiple of 16."""
    noise = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((72, 56), Image.Resampling.BICUBIC)
