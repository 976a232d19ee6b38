"""The types of layers that can be trained: LoRA, and those that plugins add."""

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dstrain.config.options import LoraOptions
from dstrain.errors import UsageError
from dstrain.installed import NamingPlugin, how_to_have
from dstrain.lazy import import_name
from dstrain.lora.layers import Layer, LoraLayer
from dstrain.registry import disabled_plugins, extensions_in_use


class LoraType:
    """A type of layers that peft adds to a network: plugins subclass it. This one is LoRA.

    A plugin's has a name of its own, and what differs of the rest.
    """

    plugin: str = ""
    """The plugin that it is of, as errors name it; set by dstrain, '' for its own."""
    name: ClassVar[str] = "lora"
    """A value of --lora_type."""
    keys: ClassVar[str] = r"lora_[AB](?:\.[^.]+)?\.weight|lora_embedding_[AB]"
    """Regular expression of what follows a layer's name in peft's names of its tensors."""
    kind: ClassVar[str] = "LoraConfig"
    """The name of peft's configuration."""
    fields: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields of that configuration, beside ranks, alphas and targets."""
    diffusers: ClassVar[bool] = True
    """Whether diffusers reads rank and alpha of such layers from a file's header."""
    linear_only: ClassVar[bool] = False
    """Whether it is for linear layers alone."""
    stored: ClassVar[bool] = True
    """Whether it can be added to layers whose weights are stored in another form."""
    dropout: ClassVar[bool] = True
    """Whether --lora_dropout applies."""
    below: ClassVar[bool] = True
    """Whether it can be added to a layer that has LoRA already: not what changes that, nor
    what peft cannot have beside it."""
    sizes: ClassVar[str] = "--lora_rank"
    """The options that decide the shapes of its tensors."""
    merged: ClassVar[bool] = False
    """Whether inference merges it into weights, rather than to add it to layers."""

    @property
    def naming(self) -> NamingPlugin:
        """Name the plugin in what is raised within it."""
        return NamingPlugin(self.plugin, f"its LoRA type {self.name!r}")

    def names(self, parts: Collection[str]) -> bool:
        """Return whether all of these names are of its tensors, without their layer's."""
        return all(re.fullmatch(self.keys, part) for part in parts)

    def has_alpha(self, parts: Mapping[str, Tensor]) -> bool:
        """Return whether the alpha of a layer of these tensors counts."""
        return True

    def settings(self, options: LoraOptions) -> dict[str, Any]:
        """Return the values of options of the type, without those at their defaults.

        They are part of what decides a run, and of a file's header.
        """
        return {}

    def configured(self, numbers: dict[str, Any], settings: Mapping[str, Any]) -> Any:
        """Return peft's configuration of layers to train.

        Args:
            numbers: Its fields `target_modules`, `r`, `lora_alpha`, `rank_pattern`,
                `alpha_pattern`, and `lora_dropout` if there is one.
            settings: What `settings` returned.
        """
        return self.in_peft(**numbers, **self.fields)

    def in_peft(self, **fields: Any) -> Any:
        """Return peft's configuration of this kind, imported without optional libraries."""
        with self.naming:
            return import_name("peft", self.kind)(**fields)

    def to_hold(self, layers: Mapping[str, Layer], numbers: dict[str, Any]) -> Any:
        """Return peft's configuration of layers that are to get the numbers of these;
        `numbers` is as for `configured`.
        """
        return self.configured(numbers, {})

    def numbers_of(self, wrapped: Any, adapter: str) -> tuple[int, float]:
        """Return the rank and the alpha of a layer that peft has wrapped."""
        return wrapped.r[adapter], wrapped.lora_alpha[adapter]

    def layer(
        self, parts: Mapping[str, Tensor], rank: int | None, alpha: float | None
    ) -> Layer:
        """Return a layer of tensors by what follows its name, sharing their memory.

        `parts` is as `keys` matches it; the rank is None if it is not known, and an alpha
        of None is the rank. Raises ValueError for parts that are not all there, or do not
        fit each other.
        """
        down, up = pair_of(parts)
        return LoraLayer(down, up, float(len(down)) if alpha is None else alpha)

    @torch.no_grad()
    def fill(self, own: Layer, layer: Layer) -> None:
        """Copy a layer into the memory of another one of this type."""
        given = layer.parts()
        for name, tensor in own.parts().items():
            tensor.copy_(given[name])

    @torch.no_grad()
    def hold(self, wrapped: Any, adapter: str, own: Layer, layer: Layer) -> None:
        """Give a layer of an adapter from `to_hold` the numbers of another one."""
        self.fill(own, layer)

    def shapes_of(self, layer: Layer) -> str:
        """Return the shapes of a layer for comparison with those of one in training; ''
        where ranks and alphas decide them.
        """
        return ""

    def check(self, ranks: Mapping[str, int], network: nn.Module, flag: str) -> None:
        """Raise UsageError for layers of a network that cannot have this type."""


def pair_of(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return `down` and `up` by peft's names; raises ValueError for less, or more."""
    found: dict[str, Tensor] = {}
    for name, tensor in parts.items():
        which = re.match(r"lora_(?:embedding_)?([AB])", name)
        if which is not None:
            if which[1] in found or tensor.ndim < 2:
                raise ValueError(f"have not one matrix lora_{which[1]}")
            found[which[1]] = tensor
    if found.keys() != {"A", "B"}:
        raise ValueError("lack lora_A, lora_B or an alpha")
    down, up = found["A"], found["B"]
    if up.numel() != len(up) * len(down):
        shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
        raise ValueError(f"have matrices of different ranks: {shapes}")
    return down, up


LORA = LoraType()


def known_types() -> dict[str, LoraType]:
    """Return the types by name: LoRA first, then those of installed plugins."""
    offered = extensions_in_use().offered("dstrain_lora_types", LoraType, (LORA.name,))
    return {LORA.name: LORA, **offered}


def type_of(parts: Collection[str]) -> LoraType:
    """Return the first type that tensors of these names are of; raises ValueError where
    none is, and UsageError where one failed.
    """
    failed: Exception = ValueError("are of several types")
    for one in known_types().values():
        try:
            with one.naming:
                if one.names(parts):
                    return one
        except UsageError as error:
            failed = error
    raise failed


def type_named(name: str, flag: str = "--lora_type") -> LoraType:
    """Return a type by name; raises UsageError for one that is not installed."""
    known = known_types()
    if name not in known:
        what = f"expected one of {', '.join(known)}, got {name!r}"
        advice = how_to_have("lora_type", name, disabled_plugins())
        raise UsageError(flag, what, *filter(None, [advice]))
    return known[name]
