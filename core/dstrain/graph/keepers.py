"""Define how weights of components are kept: in fewer bytes, in another place, and how a
network computes with them. Torch-free.

Loading, the training step and the pipeline call keepers, and do not know what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from dstrain.errors import DstrainError, UsageError
from dstrain.installed import described

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["quantize", "tile", "compile", "move"]
KINDS: tuple[Kind, ...] = ("quantize", "tile", "compile", "move")
"""The kinds of keepers, in the order in which those of a component are called."""
BEFORE_LORA: tuple[Kind, ...] = ("quantize",)
"""The kinds that check networks before LoRA layers are in."""
WITH_LORA: tuple[Kind, ...] = ("tile", "compile", "move")
"""The kinds that check networks whose LoRA layers are in."""
NO_NAMES: Mapping[str, Collection[str]] = MappingProxyType({})


@dataclass(frozen=True)
class Identity:
    """What the numbers of a component depend on because of a keeper."""

    name: str
    """Under which it is recorded: of keepers with the same name, one is used at a time."""
    value: Any
    """What tells it, as JSON; True says no more than that it is so, whichever the
    component."""
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
    """Those that are always on the device."""
    ram: int = 0
    """Those in RAM."""
    used: int = 0
    """Those that are also on the device while a unit or decoder uses the component."""


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
        """Return the parameter or buffer to keep for a weight as it is read.

        It may replace the layer that the weight belongs to.

        Args:
            component: The component.
            network: Its network, some weights of which are not read yet.
            name: The weight's name in it.
            weight: The weight, a preset LoRA merged; on the device, unless `is_in_ram`.
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
        """Keep networks that are loaded; the LoRA layers of those that are trained are in.

        Args:
            networks: Those of its components that are here, by name.
            device: The device that computes with them.
            saved: Component -> names of frozen weights that are saved with what is
                trained.
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


@contextmanager
def asking(keeper: Keeper) -> Iterator[None]:
    """Within, a keeper does what it is asked: errors that are neither dstrain's nor the
    machine's name its plugin.
    """
    try:
        yield
    except (DstrainError, MemoryError, OSError):
        raise
    except Exception as error:
        # torch's, of a device
        if type(error).__name__ == "OutOfMemoryError":
            raise
        what = f"its keeper {type(keeper).__name__} raised {described(error)}"
        raise UsageError(keeper.plugin, what) from error


def ask(keeper: Keeper, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Call a method of a keeper; errors are as in `asking`."""
    with asking(keeper):
        return call(*given, **named)


@contextmanager
def _within(
    keeper: Keeper, made: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Within, a context that a keeper makes; errors of entering and leaving it name its
    plugin, those of the block do not.
    """
    with ExitStack() as stack:
        with asking(keeper):
            stack.enter_context(made())
        yield
        with asking(keeper):
            stack.close()


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
    """Those that are loaded and that units or decoders use."""
    in_steps: Collection[str] = ()
    """Those that training steps use; () for a command that does not train."""
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


@dataclass(frozen=True)
class Keepers:
    """The keepers of a command."""

    all: tuple[Keeper, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.all)

    @classmethod
    def checked(cls, found: Iterable[tuple[str, Keeper]]) -> Keepers:
        """Put keepers in order; raises UsageError for two of a kind for a component, and for
        one that is for none.

        found: (name of the plugin in errors, its keeper).
        """
        owners: dict[tuple[str, str], tuple[str, Keeper]] = {}
        keepers = []
        for plugin, keeper in found:
            keeper.plugin = plugin
            where = keeper.flag or plugin
            if keeper.kind not in KINDS:
                what = f"its keeper {type(keeper).__name__} is of kind {keeper.kind!r}"
                raise UsageError(plugin, f"{what}; kinds: {', '.join(KINDS)}")
            if not keeper.components:
                what = f"its keeper {type(keeper).__name__} is for no component"
                raise UsageError(plugin, what)
            for name in keeper.components:
                other = owners.setdefault((name, keeper.kind), (plugin, keeper))
                if other[1] is not keeper:
                    theirs = other[1].flag or other[0]
                    what = (
                        f"{theirs} and {where} both {keeper.kind} the weights of {name}"
                    )
                    raise UsageError(where, what, "leave one of them out")
            keepers.append(keeper)
        return cls(tuple(sorted(keepers, key=lambda one: KINDS.index(one.kind))))

    def of(self, component: str) -> list[Keeper]:
        """Return the keepers of a component, in the order in which they are called."""
        return [one for one in self.all if component in one.components]

    def copies(self) -> Keepers:
        """Return them for one more pipeline."""
        return Keepers(tuple(map(copy, self.all)))

    @property
    def recompute(self) -> bool:
        """Return whether blocks of what is trained must be recomputed."""
        return any(one.recomputes for one in self.all)

    @property
    def recorded(self) -> dict[str, Any]:
        """Return values of options that mean the same with other model files."""
        found: dict[str, Any] = {}
        for one in self.all:
            found |= ask(one, one.recorded)
        return found

    def describe(self, component: str) -> str:
        """Return how a component is kept, in words; '' for as it is loaded."""
        words = [ask(one, one.describe, component) for one in self.of(component)]
        return ", ".join(filter(None, words))

    def described(self, components: Iterable[str]) -> dict[str, str]:
        """Return how these components are kept, those that are as loaded left out."""
        words = {name: self.describe(name) for name in components}
        return {name: text for name, text in words.items() if text}

    def identities(
        self, component: str, config: Mapping[str, Any] | None = None
    ) -> list[Identity]:
        """Return what a component's numbers depend on; see `Keeper.identity`."""
        of = self.of(component)
        found = [ask(one, one.identity, component, config) for one in of]
        return [one for one in found if one is not None]

    def check(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        kinds: Collection[Kind] = KINDS,
    ) -> None:
        """Let keepers of some kinds check networks without memory."""
        for keeper, own in self._with(networks):
            if keeper.kind in kinds:
                ask(keeper, keeper.check, own, device)

    def prepared(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        saved: Mapping[str, Collection[str]] = NO_NAMES,
    ) -> None:
        """Let keepers keep networks that are loaded."""
        for keeper, own in self._with(networks):
            ask(keeper, keeper.prepared, own, device, saved)

    def _with(
        self, networks: Mapping[str, nn.Module]
    ) -> list[tuple[Keeper, dict[str, nn.Module]]]:
        found = []
        for keeper in self.all:
            own = {
                name: networks[name] for name in networks if name in keeper.components
            }
            if own:
                found.append((keeper, own))
        return found

    def on_device(self, components: Iterable[str]) -> AbstractContextManager[object]:
        """Return a context in which components are used."""
        stack = ExitStack()
        for name in components:
            for keeper in self.of(name):
                made = partial(keeper.on_device, name)
                stack.enter_context(_within(keeper, made))
        return stack

    def readable(self) -> AbstractContextManager[object]:
        """Return a context in which all weights can be read and changed."""
        stack = ExitStack()
        for keeper in self.all:
            stack.enter_context(_within(keeper, keeper.readable))
        return stack

    def step_done(self) -> None:
        """Let keepers know that a backward pass, or an image, is done."""
        for keeper in self.all:
            ask(keeper, keeper.step_done)

    def size(self, component: str, weight: WeightSize) -> int:
        """Return the bytes that a weight of a component takes."""
        for keeper in self.of(component):
            weight = replace(weight, size=ask(keeper, keeper.size, component, weight))
        return weight.size

    def bytes(self, component: str, weights: Sequence[WeightSize]) -> KeptBytes:
        """Return where the bytes of a component's frozen weights are."""
        sized = [replace(one, size=self.size(component, one)) for one in weights]
        movers = [one for one in self.of(component) if one.kind == "move"]
        mover = (*movers, Keeper())[0]
        return ask(mover, mover.bytes, component, sized)


AS_LOADED = Keepers()
"""None: weights are as they are loaded."""
