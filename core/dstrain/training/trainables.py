"""Make whole components, parts of them, or LoRA layers trainable."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dstrain.config import LoraFile, split_commas
from dstrain.config.options import LoraOptions
from dstrain.errors import StateError, UsageError, nearest
from dstrain.lora import (
    LoraConfig,
    Trainables,
    base_shapes,
    inject,
    load_layers,
    log_differences,
    lora_layers,
    matching_names,
    read_lora,
    type_named,
    unused_layers,
)
from dstrain.pipeline import Pipeline
from dstrain.registry import ModelFamily


@dataclass
class TrainableModules:
    """The result of making a pipeline's modules trainable."""

    components: tuple[str, ...] = ()
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """'component.name' -> the module that holds this trained parameter, and its name
    there."""
    lora: dict[str, LoraConfig] = field(default_factory=dict)
    """Component -> its LoRA layers."""
    matched_modules: dict[str, dict[str, int]] = field(default_factory=dict)
    """Component -> target -> number of modules with LoRA."""
    unused_parameters: list[str] = field(default_factory=list)
    """Parameters that stay frozen because no loss reaches them."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return 'component.name' -> trained parameter, in a fixed order; looked up
        each time, since sharding puts others in their places.
        """
        return {
            name: getattr(module, own) for name, (module, own) in self.places.items()
        }

    def add(self, component: str, network: nn.Module, name: str) -> None:
        """Count a network's parameter among the trained ones."""
        owner, _, own = name.rpartition(".")
        self.places[f"{component}.{name}"] = (network.get_submodule(owner), own)


def trainables_of(
    trainable_models: str | None, options: LoraOptions, family: ModelFamily
) -> Trainables:
    """Return what the flags ask to train; by default LoRA on the family's component.
    Raises UsageError for a component without default targets, and a type that is not
    installed.
    """
    full = split_commas(trainable_models)
    usual = "" if full else family.default_trainable
    kind = type_named(options.lora_type)
    if options.lora_dropout and not kind.dropout:
        what = f"{kind.name} has no dropout of its input"
        raise UsageError("--lora_dropout", what, "leave it out, or train lora")
    given = split_commas(options.lora_target_modules)
    lora = []
    for component in dict.fromkeys(split_commas(options.lora_base_model or usual)):
        targets = given or family.lora_targets.get(component)
        if not targets:
            raise UsageError(
                "--lora_target_modules",
                f"is required: {family.name} has no default targets for {component!r}",
                f"it has targets for {', '.join(family.lora_targets)}",
            )
        with kind.naming:
            settings = kind.settings(options)
        lora.append(LoraConfig.of(options, component, tuple(targets), settings))
    return Trainables(full, tuple(lora))


def start_from_lora(
    pipeline: Pipeline, trained: Mapping[str, LoraConfig], file: LoraFile
) -> None:
    """Fill the LoRA layers in training, by component, from a file with any naming.

    Logs a warning for what it was trained with that differs here, unless the pipeline
    has no weights. Raises StateError unless every key, rank and alpha fits.
    """
    path, patterns = file.path, pipeline.spec.unused_parameters
    shapes = {name: base_shapes(pipeline.components[name]) for name in trained}
    if len(shapes) == 1:
        file = replace(file, component=min(shapes))
    loras = read_lora(file, pipeline.family, shapes, patterns)
    missing = trained.keys() - {lora.component for lora in loras}
    if missing and not file.component:
        what = f"has no layers for {', '.join(sorted(missing))}"
        raise StateError(path, what, "give COMPONENT=FILE for a file of one")
    for lora in loras:
        network = pipeline.components[lora.component]
        lora.refuse_merged(path, "training cannot start from")
        if not next(network.parameters()).is_meta:
            files = pipeline.files.get(lora.component)
            log_differences(lora, path, pipeline.spec.variant, files)
        own = patterns.get(lora.component, ())
        unused = unused_layers(own, shapes[lora.component])
        load_layers(lora_layers(network), lora.trained_layers(path), path, unused)


def check_start(file: LoraFile, trained: Collection[str]) -> None:
    """Refuse what a file to start from cannot have: a scale, which training would not
    know of, and a component without LoRA layers in training; raises UsageError.
    """
    if file.scale != 1:
        what = f"has no scale, but {file} has {file.scale:g}"
        raise UsageError(
            "--lora_checkpoint", what, "training starts from the layers as they are"
        )
    if file.component and file.component not in trained:
        what = f"is for {file.component}, but LoRA on {', '.join(trained)} is trained"
        raise UsageError(
            "--lora_checkpoint", what, f"give --lora_base_model {file.component}"
        )


def prepare_trainables(
    pipeline: Pipeline, trainables: Trainables, dtype: torch.dtype = torch.float32
) -> TrainableModules:
    """Freeze every component except what is trained: that is of the dtype, and alone in
    training mode. Raises UsageError for a name that is no loaded network or part of
    one, and for nothing to train.
    """
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.requires_grad_(False).eval()
    for name in trainables.full:
        part = _part(pipeline, name)
        if dtype == torch.float32:
            part.float()
        part.requires_grad_(True).train()
        _cast_trained(part, dtype)
    trained = TrainableModules(trainables.components)
    for lora_config in trainables.lora:
        name = lora_config.component
        module = _part(pipeline, name)
        trained.lora[name] = lora_config
        matched = inject(module, lora_config, pipeline.family.lora_aliases)
        trained.matched_modules[name] = matched
        _cast_trained(module, dtype)  # they are drawn in fp32
        module.train()
    for component in trainables.components:
        network = pipeline.components[component]
        named = dict(network.named_parameters())
        unused = matching_names(
            pipeline.spec.unused_parameters.get(component, ()), named
        )
        for name, parameter in named.items():
            if not parameter.requires_grad:
                continue
            if name in unused:
                # DDP waits for the gradient of every parameter that requires one.
                parameter.requires_grad_(False)
                trained.unused_parameters.append(f"{component}.{name}")
            else:
                trained.add(component, network, name)
    if not trained.places:
        names = ", ".join(trainables.components) or "no component"
        raise UsageError("--trainable_models", f"nothing to train in {names}")
    return trained


def _cast_trained(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast trained parameters; buffers, which may be complex, stay as they are."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _part(pipeline: Pipeline, name: str) -> nn.Module:
    """Return a component or a dotted part of one."""
    component, _, path = name.partition(".")
    module = pipeline.components.get(component)
    parts: dict[str, nn.Module] = {}
    if isinstance(module, nn.Module):
        parts = dict(module.named_modules())
    if path not in parts:
        what = (
            f"{name!r} is not a loaded network or a part of one{nearest(path, parts)}"
        )
        raise UsageError("--trainable_models", what)
    return parts[path]
