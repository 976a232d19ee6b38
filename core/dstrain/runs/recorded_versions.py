"""The versions of what computes a run, and of a family's code for its components."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dstrain.graph.code_digest import code_of_module, facts_of
from dstrain.installed import installed
from dstrain.models import components_of
from dstrain.models.device import attention_backend
from dstrain.registry import ModelFamily

LIBRARIES = (
    *("core", "torch", "transformers", "diffusers", "accelerate", "safetensors"),
    *("pillow", "av", "numpy"),
)
"""Distributions whose versions a run records, where they are installed."""


def versions_of(family: ModelFamily, device: torch.device) -> dict[str, str]:
    """Return the versions of the family and of libraries that compute, the device, and
    the attention if it is not torch's own.
    """
    versions = {
        plugin.distribution: plugin.version
        for plugin in installed()
        if plugin.name == family.name
    }
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {**versions, "device": device.type, **attention_backend()}


def component_code(family: ModelFamily, name: str) -> Mapping[str, Any]:
    """Return the version of the family's own code for a component, or the digests of
    the module that declares it and of what this imports; not of what its files contain.
    """
    component = components_of(family)[name]
    if component.version:
        return {"version": component.version}
    module = family.components.partition(":")[0]
    where = f"component {name} of {family.name}"
    return facts_of(code_of_module(module), where, "give it Component(version=1)")
