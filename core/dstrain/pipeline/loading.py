"""Load the components of a pipeline from the files found."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from dstrain.console import get_logger
from dstrain.graph.plan import make_plan
from dstrain.graph.spec import PipelineSpec
from dstrain.lora.layers import merge_layers
from dstrain.lora.names import shapes_of
from dstrain.lora.reader import read_lora
from dstrain.models.components import components_of
from dstrain.models.locate import Found, ModelConfig, find
from dstrain.pipeline.sampling import generate_task
from dstrain.registry.family import ModelFamily

logger = get_logger(__name__)


def find_for_inference(
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
) -> Found:
    """Find the files of everything that inference with any inputs uses."""
    plan = make_plan(spec, frozenset(spec.inputs), generate_task(spec, guided=True))
    components, configs = plan.components[""], plan.configs[""]
    return find(family, models, components, configs, spec.components)


def load_components(
    family: ModelFamily,
    spec: PipelineSpec,
    found: Found,
    device: torch.device,
    dtype: torch.dtype,
    full_precision: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load what was found, frozen and in eval mode, with preset LoRAs merged.

    Returns the modules and tokenizers by name, and the configurations, also those of
    components that are not loaded.

    Args:
        family: The family of the components.
        spec: The pipeline they are for.
        found: Their files and configurations.
        device: The device to put modules on.
        dtype: The dtype of weights.
        full_precision: Names of components that are loaded in fp32 instead.
    """
    known = components_of(family)
    configs = {
        name: known[name].configure(content) for name, content in found.configs.items()
    }
    components = {}
    for name, files in found.files.items():
        own_dtype = torch.float32 if name in full_precision else dtype
        module = known[name].load(files, configs.get(name), own_dtype)
        if isinstance(module, torch.nn.Module):
            module = module.requires_grad_(False).eval().to(device)
            if files.preset is not None:
                shapes = {name: shapes_of(module)}
                unused = spec.unused_parameters
                for lora in read_lora(files.preset, family, shapes, name, unused):
                    merge_layers(module, lora.layers)
                logger.info(f"preset {files.preset} merged into {name}")
        components[name] = module
    return components, configs
