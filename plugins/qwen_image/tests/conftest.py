"""One toy model, written once, and its components as this plugin loads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.components import Files
from dstrain_qwen_image.components import COMPONENTS
from dstrain_qwen_image.toy import write


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Load every component of a model folder, and its configuration as units borrow it."""
    lent: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype}
    for component in COMPONENTS:
        place = folder / component.folder
        configuration = None
        if not component.is_folder:
            configuration = component.configure(json.loads((place / "config.json").read_text()))
            lent[f"{component.name}_config"] = configuration
        paths = (place,) if component.is_folder else tuple(sorted(place.glob("*.safetensors")))
        lent[component.name] = component.load(Files(paths), configuration, dtype)
    for name in ("dit", "text_encoder", "vae"):
        lent[name].requires_grad_(False)
    return lent


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write(folder)
    return folder


@pytest.fixture
def lent(toy_folder: Path) -> dict[str, Any]:
    """Fresh components, in fp32."""
    return load(toy_folder)


@pytest.fixture
def lent_bf16(toy_folder: Path) -> dict[str, Any]:
    """Fresh components, in bf16."""
    return load(toy_folder, torch.bfloat16)
