"""The torch-free record by which a plugin offers a family (entry-point group `dstrain.models`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

API = 1
"""Number of the plugin interface; a record made for another number is shown as broken."""


@dataclass(frozen=True)
class Option:
    """A flag of the family's own: `--<name>`, kept as text; `component` is the component whose path it gives."""

    name: str
    help: str
    component: str = ""


@dataclass(frozen=True)
class ModelRecord:
    """A family: names and numbers only, so that listing it imports no torch.

    wiring: "package.module:function", function(variant) -> Wiring. components: "package.module:COMPONENTS", a tuple of
    Component. toy: "package.module:function", function(folder, variant, seed) writes a toy model as published.
    variants: the first is the default. lora_targets: component -> target patterns. lora_aliases: other name -> pattern.
    lora_prefixes: component -> prefix of its keys in a LoRA file. inference: default arguments of the pipeline's call.
    default_ids: component -> "model id:pattern" used when nothing else says where a tokenizer is.
    """

    name: str
    wiring: str
    components: str
    toy: str
    variants: tuple[str, ...]
    default_trainable: str
    lora_targets: Mapping[str, tuple[str, ...]]
    lora_prefixes: Mapping[str, str]
    lora_aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    inference: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    default_ids: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    options: tuple[Option, ...] = ()
    api: int = API

    def load(self, part: str) -> Any:
        """Import what a field such as `wiring` names; imports torch."""
        module, _, name = str(getattr(self, part)).partition(":")
        return getattr(import_module(module), name)
