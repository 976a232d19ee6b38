"""What is worth training in a variant: every set that the contract is held to."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dstrain.graph.plan import make_plan
from dstrain.graph.spec import PipelineSpec
from dstrain.registry.family import ModelFamily
from dstrain.testing.rows import data_inputs
from dstrain.training.losses import SFT

LORA = MappingProxyType({"lora_rank": 4, "lora_alpha": 6.0})
"""A LoRA whose alpha is not its rank, so that a scale that is lost is noticed."""


@dataclass(frozen=True)
class TrainedSet:
    """A set of trainables: full names components trained whole, lora the one that gets
    LoRA layers ('': none).
    """

    full: tuple[str, ...] = ()
    lora: str = ""

    @property
    def name(self) -> str:
        """How test ids have it: 'text_encoder+dit_lora'."""
        return "+".join([*self.full, *([f"{self.lora}_lora"] if self.lora else [])])

    @property
    def components(self) -> tuple[str, ...]:
        """The components that are trained."""
        return (*self.full, *([self.lora] if self.lora else []))

    @property
    def flags(self) -> Mapping[str, Any]:
        """The fields of a TrainConfig that ask for it."""
        full = {"trainable_models": ",".join(self.full)} if self.full else {}
        return {**full, **({"lora_base_model": self.lora, **LORA} if self.lora else {})}


def trained_sets(family: ModelFamily, spec: PipelineSpec) -> tuple[TrainedSet, ...]:
    """LoRA on the denoiser and the denoiser whole, by each of its parts; every
    conditioner whole, alone and with LoRA.

    A conditioner is a network that units borrow to make what model_fn reads, such as a
    text encoder. Those of the record's `lora_targets` get LoRA layers alone, too.
    """
    parts = denoisers(family, spec)
    sets = [
        one for part in parts for one in (TrainedSet(lora=part), TrainedSet((part,)))
    ]
    for encoder in conditioners(family, spec):
        sets += [TrainedSet((encoder,)), TrainedSet((encoder,), parts[0])]
        sets += [TrainedSet(lora=encoder)] if encoder in family.lora_targets else []
    return tuple(sets)


def denoisers(family: ModelFamily, spec: PipelineSpec) -> tuple[str, ...]:
    """The denoiser, or its parts where it has several, the noisiest first."""
    return spec.experts.components if spec.experts else (family.default_trainable,)


def conditioners(family: ModelFamily, spec: PipelineSpec) -> tuple[str, ...]:
    """The networks that units borrow to make what model_fn reads, less those that
    decoders borrow, too (a VAE).
    """
    networks = {
        component.name
        for component in family.load("components")
        if not component.is_folder
    }
    decoding = {name for decoder in spec.decoders for name in decoder.components}
    wanted = set(spec.model_fn.inputs)
    borrowed: set[str] = set()
    for step in reversed(make_plan(spec, data_inputs(spec), SFT).cached_steps):
        if wanted & set(step.unit.outputs):
            wanted |= set(step.unit.inputs)
            borrowed |= set(step.unit.components)
    return tuple(
        name for name in spec.components if name in (borrowed & networks) - decoding
    )
