"""Define how weights of components are kept: in fewer bytes, in another place, and how
a network computes with them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


Kind = Literal["quantize", "tile", "compile", "move"]
NO_NAMES: Mapping[str, Collection[str]] = MappingProxyType({})


@dataclass(frozen=True)
class Identity:
    """What the numbers of a component depend on because of a keeper."""

    name: str
    """Under which it is recorded: of keepers with the same name, one is used at a time."""
    value: Any
    """What tells it of this component, as JSON, such as True."""
    fact: str = ""
    """It in words, for errors about caches of another plan, such as 'tiles of vae'; ''
    for what changes no cached value."""


@dataclass(frozen=True)
class WeightSize:
    """A weight of a network, from which its bytes are told without loading it."""

    layer: str
    """The dotted name of its layer."""
    shape: tuple[int, ...]
    size: int
    """Its bytes."""
    is_linear: bool
    """Whether it is the frozen weight of a linear layer, and of no other layer, too."""
    block: int
    """The number of the repeated block that it is in, from 0; -1 for none."""


@dataclass(frozen=True)
class KeptBytes:
    """Where the bytes of a component's weights are."""

    device: int
    """The bytes that are always on the device."""
    ram: int = 0
    """The bytes that are in RAM."""
    used: int = 0
    """The bytes that are on the device, too, while a unit or decoder uses the component."""


class Keeper:
    """Keeps the weights of some components in a way of its own. Every method does nothing
    by default.

    A plugin returns keepers by `dstrain_keepers`. Each pipeline that is loaded calls a copy
    (`copy.copy`): what a keeper learns of networks it sets in `prepared`, not before.
    """

    kind: Kind = "move"
    """What it does: 'quantize', 'tile' and 'compile' change numbers, 'move' changes none.
    A component has at most one of a kind."""
    flag: str = ""
    """The option that asks for it, for errors."""
    components: Collection[str] = ()
    """The names of the components that it is for."""
    recomputes: bool = False
    """Whether blocks of what is trained must be recomputed in the backward pass."""
    unshardable: str = ""
    """Why the networks cannot be sharded among processes; '' if they can."""
    plugin: str = ""
    """The plugin that it is of, for errors: dstrain says it."""

    def describe(self, component: str) -> str:
        """Return how the component is kept, in words; '' for nothing worth saying."""
        return ""

    def identity(
        self, component: str, config: Mapping[str, Any] | None
    ) -> Identity | None:
        """Return what the component's numbers depend on; None where they do not change.
        Raises UsageError for a component that it cannot keep so.

        config: The content of its config.json; None where that is not known.
        """
        return None

    def recorded(self) -> Mapping[str, Any]:
        """Return values of options that mean the same with other model files."""
        return {}

    def check(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Do what `place` and `prepared` do to networks whose weights have no memory: raise
        UsageError for those that it cannot keep, and change how they compute.

        One of kind 'quantize' is asked before LoRA layers are in.
        """

    def place(
        self, component: str, network: nn.Module, name: str, weight: Tensor
    ) -> Tensor:
        """Return the parameter or buffer to keep for a weight as it is read, a preset
        LoRA merged; it may replace the layer that the weight belongs to.

        The weight is on the device, unless `is_in_ram`. Others of the network may not
        be read yet.
        """
        return weight

    def is_in_ram(self, component: str, network: nn.Module, name: str) -> bool:
        """Return whether a weight stays in RAM, and is not moved to the device where no
        other keeper needs it there.
        """
        return False

    def prepared(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        saved: Mapping[str, Collection[str]] = NO_NAMES,
    ) -> None:
        """Keep networks that are loaded, of its components, by name; the LoRA layers of
        those that are trained are in.

        saved: Component -> names of frozen weights that are saved with what is trained.
        """

    def on_device(self, component: str) -> AbstractContextManager[object]:
        """Return a context in which a unit, a decoder or model_fn uses the component."""
        return nullcontext()

    def readable(self) -> AbstractContextManager[object]:
        """Return a context in which weights can be read and changed, wherever they are."""
        return nullcontext()

    def step_done(self) -> None:
        """Learn that a backward pass, or an image, is done."""

    def size(self, component: str, weight: WeightSize) -> int:
        """Return the bytes that a weight takes."""
        return weight.size

    def bytes(self, component: str, weights: Sequence[WeightSize]) -> KeptBytes:
        """Return where the bytes of a component's frozen weights are; their sizes are those
        that `size` of all its keepers leaves.
        """
        return KeptBytes(sum(one.size for one in weights))


@dataclass(frozen=True)
class KeeperRequest:
    """What a command does with components, for `dstrain_keepers`."""

    options: Any
    """The configuration of the command; `options.of(RECORD)` returns a plugin's own."""
    components: Mapping[str, Any]
    """The family's components, `dstrain.plugin.Component`, by name."""
    named: Callable[[str, str], Sequence[str]]
    """(flag, text) -> the components that the text names, by name or as the model flags
    have their files; raises UsageError where it names none."""
    of_variant: Sequence[str] = ()
    """The components of the variant."""
    variant: str = ""
    """The variant, in words."""
    loaded: Sequence[str] = ()
    """The components that the command loads, in any stage."""
    denoisers: Sequence[str] = ()
    """The components of the variant that predict: one, or the experts."""
    used: Collection[str] = ()
    """The components that are loaded and that units or decoders use."""
    in_steps: Collection[str] = ()
    """The components that training steps use; () for a command that does not train."""
    full: Sequence[str] = ()
    """What is trained in full: components, or parts such as dit.blocks.3."""
    lora: Mapping[str, str] = field(default_factory=dict)
    """Component with LoRA -> the type of its layers."""
    needs_plain: Collection[str] = ()
    """Components whose LoRA layers compute with weights as they are loaded."""
    stage: str = ""
    """'data_process', 'train', 'generate', or '' for a run that is not split."""

    @property
    def trained(self) -> list[str]:
        """Return the components of which something is trained."""
        names = (name.partition(".")[0] for name in (*self.full, *self.lora))
        return list(dict.fromkeys(names))
