"""One toy model, written once, and its components as this plugin loads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.models import recognize
from dstrain.plugin import Component, Files
from dstrain_flux.components import COMPONENTS
from dstrain_flux.toy import write


def files_of(folder: Path, component: Component) -> Files:
    """The files of a component in a model folder, recognized by what is in them."""
    place = folder / component.folders[0]
    if component.is_folder:
        return Files((place,))
    (((found,), files),) = recognize(
        Files(tuple(sorted(place.glob("*.safetensors")))), COMPONENTS
    )
    assert found is component
    return files


def configuration_of(folder: Path, component: Component) -> Any:
    """A component's configuration as units use it; None for a tokenizer."""
    if component.is_folder:
        return None
    return component.configure(
        json.loads((folder / component.folders[0] / "config.json").read_text())
    )


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Load every component that a model folder has, frozen."""
    loaded: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype}
    for component in COMPONENTS:
        if not (folder / component.folder).exists():
            continue
        made = component.network.load(
            files_of(folder, component), configuration_of(folder, component), dtype
        )
        loaded[component.name] = (
            made.requires_grad_(False) if isinstance(made, torch.nn.Module) else made
        )
    return loaded


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write(folder)
    return folder


@pytest.fixture
def opened() -> Callable[[Path], dict[str, Any]]:
    """Load a model folder's components in fp32."""
    return load


@pytest.fixture
def loaded(toy_folder: Path) -> dict[str, Any]:
    """Fresh components, in fp32."""
    return load(toy_folder)


@pytest.fixture
def loaded_bf16(toy_folder: Path) -> dict[str, Any]:
    """Fresh components, in bf16."""
    return load(toy_folder, torch.bfloat16)
