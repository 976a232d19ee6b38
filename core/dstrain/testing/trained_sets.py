"""Sets of trainables that the contract is tested with."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dstrain.graph import PipelineSpec, make_plan
from dstrain.registry import ModelFamily
from dstrain.testing.rows import data_inputs
from dstrain.training import SFT

LORA = MappingProxyType({"lora_rank": 4, "lora_alpha": 8.0})
"""A LoRA whose alpha is not its rank, so that a scale that is lost is noticed. It is a
power of two times the rank: saved weights contain their scale without rounding.
"""


@dataclass(frozen=True)
class TrainedSet:
    """Components trained in full, and one that gets LoRA layers ('' for none)."""

    full: tuple[str, ...] = ()
    lora: str = ""

    @property
    def name(self) -> str:
        """Return the set's part of a test id: 'text_encoder+dit_lora'."""
        return "+".join([*self.full, *([f"{self.lora}_lora"] if self.lora else [])])

    @property
    def components(self) -> tuple[str, ...]:
        """Return the components that are trained."""
        return (*self.full, *([self.lora] if self.lora else []))

    @property
    def flags(self) -> Mapping[str, Any]:
        """Return the fields of a TrainConfig that ask for it."""
        full = {"trainable_models": ",".join(self.full)} if self.full else {}
        return {**full, **({"lora_base_model": self.lora, **LORA} if self.lora else {})}


def trained_sets(family: ModelFamily, spec: PipelineSpec) -> tuple[TrainedSet, ...]:
    """Return LoRA on each denoiser and each denoiser in full; each adapter and each
    conditioner in full, alone and with LoRA on the denoiser.

    An adapter is another network that model_fn calls, such as a ControlNet; a conditioner
    is one whose units compute inputs of model_fn, such as a text encoder. Those with
    default LoRA targets also get LoRA layers alone.
    """
    parts = denoisers(family, spec)
    sets = [
        one for part in parts for one in (TrainedSet(lora=part), TrainedSet((part,)))
    ]
    for encoder in (*adapters(family, spec), *conditioners(family, spec)):
        sets += [TrainedSet((encoder,)), TrainedSet((encoder,), parts[0])]
        sets += [TrainedSet(lora=encoder)] if encoder in family.lora_targets else []
    return tuple(sets)


def denoisers(family: ModelFamily, spec: PipelineSpec) -> tuple[str, ...]:
    """Return the denoiser, or its experts, the noisiest first."""
    return spec.experts.components if spec.experts else (family.default_trainable,)


def adapters(family: ModelFamily, spec: PipelineSpec) -> tuple[str, ...]:
    """Return the networks that model_fn calls beside the denoiser, such as a
    ControlNet.
    """
    known = {*spec.components} - {*denoisers(family, spec)}
    roles = spec.experts.roles if spec.experts else {}
    return tuple(
        one
        for name in spec.model_fn.components
        for one in roles.get(name, (name,))
        if one in known
    )


def conditioners(family: ModelFamily, spec: PipelineSpec) -> tuple[str, ...]:
    """Return the networks whose units compute inputs of model_fn, without those that
    decoders use (a VAE).
    """
    networks = {
        component.name
        for component in family.load("components")
        if not component.is_folder
    }
    decoding = {name for decoder in spec.decoders for name in decoder.components}
    wanted = set(spec.model_fn.inputs)
    injected: set[str] = set()
    for step in reversed(make_plan(spec, data_inputs(spec), SFT).cached_steps):
        if wanted & set(step.unit.outputs):
            wanted |= set(step.unit.inputs)
            injected |= set(step.unit.components)
    return tuple(
        name for name in spec.components if name in (injected & networks) - decoding
    )
