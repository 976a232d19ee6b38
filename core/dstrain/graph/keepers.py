"""Call the keepers of a command, in order; errors name their plugins. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from dstrain.errors import UsageError
from dstrain.graph.keeper import NO_NAMES, Identity, Keeper, KeptBytes, Kind, WeightSize
from dstrain.installed import NamingPlugin
from dstrain.storage import hash_json

if TYPE_CHECKING:
    import torch
    from torch import nn

P = ParamSpec("P")
T = TypeVar("T")
KINDS: tuple[Kind, ...] = ("quantize", "tile", "compile", "move")
"""The kinds of keepers, in the order in which those of a component are called."""
BEFORE_LORA: tuple[Kind, ...] = ("quantize",)
"""The kinds that check networks before LoRA layers are in."""
WITH_LORA: tuple[Kind, ...] = ("tile", "compile", "move")
"""The kinds that check networks whose LoRA layers are in."""


def asking(keeper: Keeper) -> AbstractContextManager[None]:
    """Within, a keeper does what it is asked; errors are as in `NamingPlugin`."""
    return NamingPlugin(keeper.plugin, f"its keeper {type(keeper).__name__}")


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
class Keepers:
    """The keepers of a command."""

    all: tuple[Keeper, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.all)

    @classmethod
    def checked(cls, found: Iterable[tuple[str, Keeper]]) -> Keepers:
        """Put keepers, each with its plugin's name in errors, in order; raises
        UsageError for two of a kind for a component, and for one that is for none.
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
                owner, other = owners.setdefault((name, keeper.kind), (where, keeper))
                if other is not keeper:
                    what = (
                        f"{owner} and {where} both {keeper.kind} the weights of {name}"
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
        return {name: text for name in components if (text := self.describe(name))}

    def identities(
        self, component: str, config: Mapping[str, Any] | None = None
    ) -> list[Identity]:
        """Return what a component's numbers depend on; see `Keeper.identity`."""
        found = []
        for one in self.of(component):
            with asking(one):
                if (identity := one.identity(component, config)) is not None:
                    hash_json("identity", identity.value)  # raises for what is no JSON
                    found.append(identity)
        return found

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
    ) -> Iterator[tuple[Keeper, dict[str, nn.Module]]]:
        for keeper in self.all:
            own = {
                name: networks[name] for name in networks if name in keeper.components
            }
            if own:
                yield keeper, own

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
        movers = (one for one in self.of(component) if one.kind == "move")
        mover = next(movers, Keeper())
        return ask(mover, mover.bytes, component, sized)


AS_LOADED = Keepers()
"""None: weights are as they are loaded."""
