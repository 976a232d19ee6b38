"""Load the components of a pipeline from the files found."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.console import get_logger
from dstrain.graph.spec import PipelineSpec
from dstrain.lora.preset import merge_preset
from dstrain.models.locate import Found
from dstrain.registry.family import ModelFamily

logger = get_logger(__name__)


LONG = 2.0
"""Seconds from which on the loading of a component is told."""


@dataclass(frozen=True)
class LoadedComponents:
    """components: name -> module or tokenizer. configs: name -> configuration without
    weights.
    """

    components: dict[str, Any]
    configs: dict[str, Any]


def load_components(
    family: ModelFamily,
    spec: PipelineSpec,
    found: Found,
    device: torch.device,
    dtype: torch.dtype,
    full_precision: Iterable[str] = (),
) -> LoadedComponents:
    """Load what was found, frozen and in eval mode; components named in
    `full_precision` are loaded in fp32.
    """
    by_name = {component.name: component for component in family.load("components")}
    configs = {
        name: by_name[name].configure(content)
        for name, content in found.configs.items()
    }
    components = {}
    for name, files in found.files.items():
        start = time.monotonic()
        module = by_name[name].load(
            files,
            configs.get(name),
            torch.float32 if name in set(full_precision) else dtype,
        )
        if isinstance(module, torch.nn.Module):
            module = module.requires_grad_(False).eval().to(device)
            if files.preset is not None:
                merge_preset(module, name, files.preset, family, spec)
                logger.info(f"preset {files.preset} merged into {name}")
        components[name] = module
        if time.monotonic() - start >= LONG:
            logger.info(f"loaded {name} in {time.monotonic() - start:.0f} s")
    return LoadedComponents(components, configs)
