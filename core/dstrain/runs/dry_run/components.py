"""What the components of a run store: shapes and dtypes, and the bytes of frozen weights as
the run keeps them.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from dstrain.config import as_size
from dstrain.errors import DstrainError
from dstrain.graph import Plan
from dstrain.graph.keepers import BEFORE_LORA, Keepers, WeightSize
from dstrain.models import Config, components_of, empty_component, find
from dstrain.models.execution import repeated_blocks
from dstrain.models.networks import set_dtype, tied_names
from dstrain.pipeline.variant_choice import entries_that_differ
from dstrain.runs.setup import Setup


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


def described_with_bytes(setup: Setup, plan: Plan) -> dict[str, str]:
    """Return how components are kept in words, with the bytes that their weights take,
    those that are as they are loaded left out.

    A component of which no configuration is given is measured as it is first published.
    Raises UsageError for layers that the given one does not have.
    """
    found = setup.keepers.described(plan.components[""])
    for name, words in found.items():
        published, config = _config_of(setup, name)
        component = components_of(setup.family)[name]
        network = None if config is None else empty_component(component, config)
        if network is None:
            continue
        if not published:
            setup.keepers.check({name: network}, setup.device, BEFORE_LORA)
        set_dtype(network, setup.dtype)
        size = planned_component(name, network.requires_grad_(False), has_lora=False)
        place = setup.keepers.bytes(name, size.tensors)
        places = {"on the device": place.device, "in RAM": place.ram}
        said = [f"{as_size(one)} {where}" for where, one in places.items() if one]
        words += f": {', '.join(said)}, loaded as {size.dtype}"
        found[name] = words + published
    return found


def _config_of(setup: Setup, name: str) -> tuple[str, Config | None]:
    """Return the configuration that the given model files tell of a component; else, that
    of the first published model that it may be of, after the words that say so.
    """
    spec, family = setup.spec, setup.family
    if setup.models:
        with suppress(DstrainError):
            found = find(family, setup.models, [name], (), spec.components, [])
            if name in found.configs:
                return "", found.configs[name]
    experts = spec.experts
    denoisers = experts.components if experts else (family.default_trainable,)
    wanted = spec.denoiser_config if name in denoisers else {}
    for model, config in components_of(family)[name].published.items():
        if not entries_that_differ(wanted, config):
            return f", if it is as in {model}", config
    return "", None
