"""Ask plugins how components are kept, as the options of a command say, and measure what
they store so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dstrain.config import LoraFile
from dstrain.config.options import ModelChoice
from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.graph import PipelineSpec, make_plan
from dstrain.graph.keeper import KeeperRequest, WeightSize
from dstrain.graph.keepers import Keepers
from dstrain.models import (
    Files,
    ModelConfig,
    component_at,
    components_of,
    recognize,
)
from dstrain.models.components import Component
from dstrain.models.execution import repeated_blocks
from dstrain.models.naming import named_files
from dstrain.models.networks import tied_names
from dstrain.pipeline.sampling import generate_task
from dstrain.registry import ModelFamily, extensions_in_use


def keeper_request(
    options: ModelChoice,
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
) -> KeeperRequest:
    """Return the request of a command; what it does with components is to be filled in."""
    known = components_of(family)
    with_weights = [one for one in spec.components if not known[one].is_folder]
    expert = given_expert(spec, family, models)

    def meant(flag: str, what: str) -> list[str]:
        if spec.experts is not None and what in spec.experts.roles and expert:
            return [spec.experts.component(what, expert)]
        if what in with_weights:
            return [what]
        if what in spec.components:
            raise UsageError(flag, f"has no effect: {what} has no weights")
        advice = f"components: {', '.join(with_weights)}"
        entries = _entries(options, family)
        if what not in entries:
            hint = nearest(what, [*with_weights, *entries])
            which = f"{spec.family} {spec.variant}"
            no = f"{what!r} is no component of {which} and no entry of the model flags"
            raise UsageError(flag, no + hint, advice)
        inside = _inside(entries[what], list(known.values()))
        found = [name for name in inside if name in with_weights]
        if not found:
            no = f"these files do not tell which component they are: {what}"
            raise UsageError(flag, no, advice)
        return found

    return KeeperRequest(
        options,
        known,
        meant,
        of_variant=spec.components,
        variant=spec.where,
        denoisers=spec.experts.components
        if spec.experts
        else (family.default_trainable,),
    )


def keepers_for_inference(
    options: ModelChoice,
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
) -> Keepers:
    """Return how components are kept that inference loads; raises what hooks raise."""
    plan = make_plan(spec, frozenset(spec.inputs), generate_task(spec, guided=True))
    request = replace(
        keeper_request(options, family, spec, models),
        loaded=plan.components[""],
        used=plan.components[""],
        stage="generate",
    )
    return extensions_in_use().keepers(request)


def with_presets(
    files: Mapping[str, Files], presets: Mapping[str, LoraFile]
) -> dict[str, Files]:
    """Return the files of components with the LoRA files merged into their weights.

    presets: Component -> its LoRA file.
    """
    return {
        name: replace(part, preset=presets.get(name)) for name, part in files.items()
    }


def given_expert(
    spec: PipelineSpec, family: ModelFamily, models: Iterable[ModelConfig]
) -> str:
    """Return the only expert of the denoiser whose files are given; '' if there are no
    experts, or not one alone is given.
    """
    if spec.experts is None:
        return ""
    known = family.load("components")
    given = {component_at(model, known) for model in models}
    experts = [name for name in spec.experts.components if name in given]
    return experts[0] if len(experts) == 1 else ""


def _entries(config: ModelChoice, family: ModelFamily) -> dict[str, ModelConfig]:
    """Return the files of the model flags by how they are typed, those of --model_id as the
    long flags name them; each file of several stands for all.
    """
    found = {}
    for one in named_files(config, family, None):
        if one.source is not None:
            found[f"{one.source.named}:{one.pattern}"] = one
        for path in [one.path] if isinstance(one.path, str) else one.path or ():
            found[path] = one
    return found


def _inside(config: ModelConfig, known: Sequence[Component]) -> list[str]:
    """Return the components that files are, by their place or else their content; none
    where files of several components have the same keys, or are not on this machine.
    """
    place = component_at(config, known)
    if place:
        return [place]
    try:
        parts = recognize(config.files(), known)
    except MissingFiles:
        return []
    if any(len(fitting) > 1 for fitting, _ in parts):
        return []
    return [fitting[0].name for fitting, _ in parts]


@dataclass(frozen=True)
class PlannedTensor(WeightSize):
    """A parameter or buffer of a network, with its bytes as it is loaded; its layer is named
    without what LoRA adds to it.
    """

    is_parameter: bool
    is_trained: bool

    @property
    def numbers(self) -> int:
        """Return how many numbers it has."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class PlannedComponent:
    """What a component stores."""

    name: str
    dtype: str
    """What its weights are loaded as: 'bf16', also where only some are, or 'fp32'."""
    tensors: tuple[PlannedTensor, ...]
    has_lora: bool = False

    @property
    def blocks(self) -> int:
        """Return how many repeated blocks it has."""
        return 1 + max((one.block for one in self.tensors), default=-1)

    @property
    def parameters(self) -> int:
        """Return the numbers of the published network: not those that LoRA adds."""
        return sum(
            one.numbers
            for one in self.tensors
            if one.is_parameter and not (self.has_lora and one.is_trained)
        )

    @property
    def trained(self) -> int:
        """Return how many numbers are trained."""
        return sum(one.numbers for one in self.tensors if one.is_trained)

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of what is not trained."""
        return sum(one.size for one in self.tensors if not one.is_trained)

    @property
    def trained_bytes(self) -> int:
        """Return the bytes of what is trained."""
        return sum(one.size for one in self.tensors if one.is_trained)


@dataclass(frozen=True)
class KeptWeights:
    """How a run keeps the weights of a component."""

    words: str
    """'' where they are as they are loaded."""
    sizes: tuple[int, ...]
    """Bytes of each tensor."""
    device: int
    """Bytes of frozen weights on the device, at the most."""
    ram: int
    """Bytes of frozen weights that wait in RAM while the component is used."""
    largest_stored: int
    """Numbers of the largest weight that is restored to compute with it."""
    is_offloaded: bool
    """Whether it is on the device only while a unit uses it."""
    is_stored: bool
    """Whether a method stores weights of it."""


def kept_weights(component: PlannedComponent, keepers: Keepers) -> KeptWeights:
    """Return where the frozen weights of a component are if they are kept so."""
    name = component.name
    sizes = [keepers.size(name, one) for one in component.tensors]
    frozen = [one for one in component.tensors if not one.is_trained]
    stored = [one.numbers for one in frozen if keepers.size(name, one) != one.size]
    place = keepers.bytes(name, frozen)
    return KeptWeights(
        words=keepers.describe(name),
        sizes=tuple(sizes),
        device=place.device + place.used,
        ram=place.ram - place.used,
        largest_stored=max(stored, default=0),
        is_offloaded=place.used > 0,
        is_stored=any(one.kind == "quantize" for one in keepers.of(name)),
    )


def planned_component(
    name: str, network: nn.Module, has_lora: bool
) -> PlannedComponent:
    """Measure the network of a component, with what is trained in it; it may be on any
    device.

    Args:
        name: The component.
        network: Its network, its weights as they are loaded.
        has_lora: Whether LoRA is trained on it.
    """
    blocks = {
        block: number for number, block in enumerate(repeated_blocks(network).keys())
    }
    shared = tied_names(network)
    linear = {
        name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and f"{name}.weight" not in shared
    }
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    seen: set[str] = set()
    tensors = []
    for full_name, tensor in (*network.named_parameters(), *network.named_buffers()):
        # Tied weights are one only after loading.
        if tied.get(full_name, full_name) in seen:
            continue
        seen.add(tied.get(full_name, full_name))
        place, _, last = full_name.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        is_trained = is_parameter and tensor.requires_grad
        owner = [block for block in blocks if full_name.startswith(f"{block}.")]
        tensors.append(
            PlannedTensor(
                layer=place.removesuffix(".base_layer"),
                shape=tuple(tensor.shape),
                size=tensor.nbytes,
                is_linear=place in linear and last == "weight" and not is_trained,
                is_parameter=is_parameter,
                is_trained=is_trained,
                block=blocks[owner[0]] if owner else -1,
            )
        )
    weights = (one.dtype for one in network.parameters() if one.is_floating_point())
    dtype = "bf16" if torch.bfloat16 in weights else "fp32"
    return PlannedComponent(name, dtype, tuple(tensors), has_lora)
