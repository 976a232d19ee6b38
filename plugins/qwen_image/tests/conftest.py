"""Toy models, each written once, and their components as this plugin loads them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.models import recognize
from dstrain.plugin import Files
from dstrain_qwen_image.components import COMPONENTS
from dstrain_qwen_image.toy import write


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Load every component of a model folder, and its configuration as units use it."""
    loaded: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype}
    for component in COMPONENTS:
        place = folder / component.folders[0]
        if not place.is_dir():
            continue
        configuration = None
        if not component.is_folder:
            configuration = component.configure(
                json.loads((place / "config.json").read_text())
            )
            loaded[f"{component.name}_config"] = configuration
        files = Files((place,))
        if not component.is_folder:
            ((_, files),) = recognize(
                Files(tuple(sorted(place.glob("*.safetensors")))), COMPONENTS
            )
        loaded[component.name] = component.network.load(files, configuration, dtype)
    for name in ("dit", "text_encoder", "vae"):
        loaded[name].requires_grad_(False)
    return loaded


@pytest.fixture(scope="session")
def toy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a variant's toy, written when it is first asked for."""

    @cache
    def folder(variant: str) -> Path:
        place = tmp_path_factory.mktemp(variant)
        write(place, variant)
        return place

    return folder


@pytest.fixture(scope="session")
def toy_folder(toy_of: Callable[[str], Path]) -> Path:
    return toy_of("base")


@pytest.fixture
def loaded(toy_folder: Path) -> dict[str, Any]:
    """Fresh components, in fp32."""
    return load(toy_folder)


@pytest.fixture
def components_of(toy_of: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """Give fresh components of a variant's toy, in fp32."""
    return lambda variant: load(toy_of(variant))


@pytest.fixture
def loaded_bf16(toy_folder: Path) -> dict[str, Any]:
    """Fresh components, in bf16."""
    return load(toy_folder, torch.bfloat16)
