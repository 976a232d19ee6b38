"""What receives gradients: whole components, parts of them, or LoRA layers in one."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from dstrain.errors import UsageError, nearest
from dstrain.lora import LoraSpec, inject
from dstrain.lora_names import layers_of
from dstrain.pipeline import Pipeline


@dataclass(frozen=True)
class Trainables:
    """full: component names, or dotted parts of one ('dit.transformer_blocks.3'). lora: LoRA layers to add."""

    full: tuple[str, ...] = ()
    lora: tuple[LoraSpec, ...] = ()

    @property
    def components(self) -> tuple[str, ...]:
        """The components that are trained, each once."""
        names = [name.partition(".")[0] for name in self.full] + [spec.component for spec in self.lora]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Trained:
    """What was made trainable: parameters by 'component.name'; matches: component -> pattern -> modules with LoRA.

    unreached: parameters left frozen because no loss reaches them.
    """

    components: tuple[str, ...] = ()
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    lora: Mapping[str, LoraSpec] = field(default_factory=dict)
    matches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()


def prepare_trainables(pipeline: Pipeline, trainables: Trainables) -> Trained:
    """Freeze every component, then open what is trained; trained parameters are fp32, only they are in train mode."""
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.requires_grad_(False).eval()
    for name in trainables.full:
        _part(pipeline, name).float().requires_grad_(True).train()
    matches = {}
    for spec in trainables.lora:
        module = _part(pipeline, spec.component)
        matches[spec.component] = inject(module, spec, pipeline.record.lora_aliases)
        module.train()
    unreached = [
        f"{name}.{parameter}"
        for name in trainables.components
        for parameter in _freeze_unreached(_part(pipeline, name), pipeline.wiring.unreached.get(name, ()))
    ]
    parameters = {
        f"{name}.{parameter}": value
        for name in trainables.components
        for parameter, value in _part(pipeline, name).named_parameters()
        if value.requires_grad
    }
    if not parameters:
        raise UsageError(
            "--trainable_models", f"nothing to train in {', '.join(trainables.components) or 'no component'}"
        )
    return Trained(
        trainables.components, parameters, {spec.component: spec for spec in trainables.lora}, matches, tuple(unreached)
    )


def _part(pipeline: Pipeline, name: str) -> nn.Module:
    component, _, path = name.partition(".")
    module = pipeline.components.get(component)
    if not isinstance(module, nn.Module):
        raise UsageError(
            "--trainable_models", f"{component!r} is not a loaded network{nearest(component, pipeline.components)}"
        )
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        names = [known for known, _ in module.named_modules()]
        raise UsageError("--trainable_models", f"{component} has no part {path!r}{nearest(path, names)}") from error


def _freeze_unreached(module: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freeze the parameters whose names match a pattern."""
    names = dict(module.named_parameters())
    frozen = [name for name in names_like(patterns, names) if names[name].requires_grad]
    for name in frozen:
        names[name].requires_grad_(False)
    return frozen


def names_like(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """The names that match a pattern; '{last}' stands for the highest index found in its place."""
    resolved = [_resolved(pattern, names) for pattern in patterns]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in resolved)]


def unreached_layers(patterns: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """The layers of a network that no loss reaches, of the names of its parameters."""
    return frozenset(layers_of(dict.fromkeys(names_like(patterns, names), (1, 1))))


def _resolved(pattern: str, names: Iterable[str]) -> str:
    before, mark, after = pattern.partition("{last}")
    if not mark:
        return pattern
    indices = [name[len(before) :].partition(".")[0] for name in names if name.startswith(before)]
    return f"{before}{max((int(index) for index in indices if index.isdigit()), default=0)}{after}"
