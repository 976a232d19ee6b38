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
    """A flag of the family's own: `--<name>`.

    component alone: the flag's value is the path of that component. component and field: the bare flag sets that entry
    of the component's configuration to true. Neither: it changes the `Setting` of its name.
    variants: those in which it acts; () for all.
    """

    name: str
    help: str
    component: str = ""
    field: str = ""
    variants: tuple[str, ...] = ()

    @property
    def is_flag(self) -> bool:
        """Whether it stands alone, with no value after it."""
        return bool(self.field)


@dataclass(frozen=True)
class ModelRecord:
    """A family: names and numbers only, so that listing it imports no torch.

    wiring: "package.module:function", function(variant) -> Wiring. components: "package.module:COMPONENTS", a tuple of
    Component. toy: "package.module:function", function(folder, variant, seed) writes a toy model as published.
    variants: the first is the toy's default. model_ids: variant -> patterns of the model ids that mean it.
    variants_for: "package.module:function", function(content of the denoiser's configuration) -> variants it can be.
    lora_targets: component -> target patterns. lora_aliases: other name of a target -> patterns.
    lora_prefixes: component -> prefix of its keys in a LoRA file.
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
    lora_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    model_ids: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    variants_for: str = ""
    default_ids: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    options: tuple[Option, ...] = ()
    api: int = API

    def load(self, part: str) -> Any:
        """Import what a field such as `wiring` names; imports torch."""
        module, _, name = str(getattr(self, part)).partition(":")
        return getattr(import_module(module), name)
