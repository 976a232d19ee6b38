"""What receives gradients: whole components, parts of them, or LoRA layers in one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from dstrain.console import get_logger
from dstrain.errors import UsageError, nearest
from dstrain.lora.layers import LoraConfig, Trainables, inject, load_layers
from dstrain.lora.names import matching_names, shapes_of
from dstrain.lora.reader import read_lora
from dstrain.pipeline.pipeline import Pipeline

logger = get_logger(__name__)


def start_from_lora(
    pipeline: Pipeline, trained: Mapping[str, LoraConfig], path: Path
) -> None:
    """Fill the LoRA layers in training, by component, from a file of any naming.

    Raises StateError unless every key, rank and alpha fit.
    """
    optional_layers = pipeline.optional_layers()
    for component, lora_config in trained.items():
        network = pipeline.components[component]
        for lora in read_lora(
            path,
            pipeline.family,
            {component: shapes_of(network)},
            component,
            optional_layers,
        ):
            for note in lora.notes:
                logger.warning(note)
            load_layers(
                network, lora.layers, lora_config, str(path), optional_layers[component]
            )


@dataclass(frozen=True)
class TrainableModules:
    """What was made trainable: parameters by 'component.name'; matches: component ->
    pattern -> modules with LoRA.

    unused_parameters: parameters left frozen because no loss reaches them.
    """

    components: tuple[str, ...] = ()
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    lora: Mapping[str, LoraConfig] = field(default_factory=dict)
    matched_modules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unused_parameters: tuple[str, ...] = ()


def prepare_trainables(pipeline: Pipeline, trainables: Trainables) -> TrainableModules:
    """Freeze every component, then open what is trained; trained parameters are fp32,
    only they are in train mode.
    """
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.requires_grad_(False).eval()
    for name in trainables.full:
        _part(pipeline, name).float().requires_grad_(True).train()
    matched_modules = {}
    for lora_config in trainables.lora:
        module = _part(pipeline, lora_config.component)
        matched_modules[lora_config.component] = inject(
            module, lora_config, pipeline.family.lora_aliases
        )
        module.train()
    unused_parameters = [
        f"{name}.{parameter}"
        for name in trainables.components
        for parameter in _freeze_unreached(
            _part(pipeline, name), pipeline.spec.unused_parameters.get(name, ())
        )
    ]
    parameters = {
        f"{name}.{parameter}": value
        for name in trainables.components
        for parameter, value in _part(pipeline, name).named_parameters()
        if value.requires_grad
    }
    if not parameters:
        raise UsageError(
            "--trainable_models",
            f"nothing to train in {', '.join(trainables.components) or 'no component'}",
        )
    return TrainableModules(
        trainables.components,
        parameters,
        {lora_config.component: lora_config for lora_config in trainables.lora},
        matched_modules,
        tuple(unused_parameters),
    )


def _part(pipeline: Pipeline, name: str) -> nn.Module:
    component, _, path = name.partition(".")
    module = pipeline.components.get(component)
    if not isinstance(module, nn.Module):
        raise UsageError(
            "--trainable_models",
            f"{component!r} is not a loaded network{nearest(component, pipeline.components)}",
        )
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        names = [known for known, _ in module.named_modules()]
        raise UsageError(
            "--trainable_models",
            f"{component} has no part {path!r}{nearest(path, names)}",
        ) from error


def _freeze_unreached(module: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freeze the parameters whose names match a pattern."""
    names = dict(module.named_parameters())
    frozen = [
        name for name in matching_names(patterns, names) if names[name].requires_grad
    ]
    for name in frozen:
        names[name].requires_grad_(False)
    return frozen
