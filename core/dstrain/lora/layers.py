"""The layers to train, and what one of them adds to a layer of a network.

LoRA (Hu et al. 2021, "LoRA: low-rank adaptation of large language models"):
y = W x + (alpha / rank) B A x.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Protocol, Self

from torch import Tensor

from dstrain.config.numbers import parse_alphas, parse_ranks
from dstrain.config.options import DEFAULT_RANK, LoraOptions


@dataclass(frozen=True)
class LoraConfig:
    """The LoRA layers to add to one component."""

    component: str
    targets: tuple[str, ...]
    """Patterns of layer names. A layer matches if its dotted name is the pattern or
    ends with '.' + pattern; `*` stands for anything.
    """
    rank: int
    alpha: float | None
    """None is each layer's own rank."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Patterns of `lora.layer_names` with the ranks of the layers that they match."""
    alphas: tuple[tuple[str, float], ...] = ()
    """The same with alphas."""
    type: str = "lora"
    """The name of a `LoraType`."""
    dropout: float = 0.0
    """The dropout of the layers' input, in training."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Name -> value of what the type has beside these, without what is at its default."""

    @classmethod
    def of(
        cls,
        options: LoraOptions,
        component: str,
        targets: tuple[str, ...],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> "LoraConfig":
        """Return what a run's options ask for, with settings of the type; raises
        UsageError for a value that cannot be parsed.
        """
        given, ranks = parse_ranks(options.lora_rank)
        alpha, alphas = parse_alphas(options.lora_alpha)
        rank = DEFAULT_RANK if given is None else given
        if alpha is None and not ranks:
            alpha = float(rank)
        return cls(
            component,
            targets,
            rank,
            alpha,
            tuple(ranks.items()),
            tuple(alphas.items()),
            options.lora_type,
            options.lora_dropout,
            tuple(settings.items()),
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Return what decides the layers, without what is at its default."""
        found = asdict(self)
        found |= dict(found.pop("settings"))
        for one in fields(self):
            if found.get(one.name) == one.default:
                del found[one.name]
        return found


@dataclass(frozen=True)
class Trainables:
    """The parts of a pipeline to train."""

    full: tuple[str, ...] = ()
    """Component names, or dotted parts of one ('dit.transformer_blocks.3')."""
    lora: tuple[LoraConfig, ...] = ()

    @property
    def components(self) -> tuple[str, ...]:
        """Return the trained components, each once."""
        names = [name.partition(".")[0] for name in self.full]
        names += [lora_config.component for lora_config in self.lora]
        return tuple(dict.fromkeys(names))

    @property
    def identity(self) -> dict[str, Any]:
        """Return what decides which weights are trained."""
        return {"full": self.full, "lora": [one.identity for one in self.lora]}


class Change(Protocol):
    """What a file changes of one parameter of a network."""

    @property
    def type(self) -> str:
        """Return what it is: of a layer, the name of its `LoraType`."""

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in, ...) as it is changed."""


@dataclass(frozen=True)
class Several:
    """Changes of one parameter, made one after the other."""

    changes: tuple[Change, Change]

    @property
    def type(self) -> str:
        """Return what the first of them is."""
        return self.changes[0].type

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in, ...) as it is changed."""
        first, second = self.changes
        return second.changed(first.changed(weight))


def by_weight(layers: Mapping[str, "Layer"]) -> dict[str, Change]:
    """Return layers as changes of their weights."""
    return {f"{name}.weight": layer for name, layer in layers.items()}


def together(*parts: Mapping[str, Change]) -> dict[str, Change]:
    """Return the changes of parameters; where several parts change one, all of them."""
    found: dict[str, Change] = {}
    for name, change in (pair for part in parts for pair in part.items()):
        found[name] = Several((found[name], change)) if name in found else change
    return found


class Layer(Change, Protocol):
    """What a layer in training, or of a file, changes of one layer of a network.

    Classes that inherit from it are layers without an alpha.
    """

    @property
    def rank(self) -> int:
        """Return its rank."""

    @property
    def alpha(self) -> float:
        """Return its alpha; the rank where it has none."""
        return float(self.rank)

    @property
    def scales(self) -> bool:
        """Return whether a factor of its matrices is one of all that it changes; else it
        is merged where a factor is given.
        """
        return False

    @property
    def acts(self) -> bool:
        """Return whether it changes a weight, as far as that follows from itself."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it is for a weight of this shape."""

    def folded(self) -> "Layer":
        """Return a layer with the same effect whose scale is 1: what files contain."""
        return self

    def with_alpha(self, alpha: float) -> "Layer":
        """Return a layer with the same effect that has this alpha, if it has one."""
        return self

    def parts(self) -> dict[str, Tensor]:
        """Return its tensors by what peft calls them, after the name of the layer."""


@dataclass(frozen=True)
class LoraLayer:
    """The LoRA of one layer: (alpha / rank) up down."""

    down: Tensor
    """(rank, in), then the kernel's axes; an embedding's `in` is its vocabulary."""
    up: Tensor
    """(out, rank)."""
    alpha: float
    type = "lora"
    scales = True

    @property
    def rank(self) -> int:
        """Return the number of rows of `down`."""
        return len(self.down)

    @property
    def scale(self) -> float:
        """Return what up down is multiplied by."""
        return self.alpha / self.rank

    @property
    def acts(self) -> bool:
        """Return whether it changes a weight, as far as that follows from itself."""
        return bool(self.up.any())

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it is for a weight of this shape."""
        product = (len(self.up), *self.down.shape[1:])
        # An embedding's weight is (vocabulary, channels): the other way round.
        return shape in (product, product[::-1])

    def with_alpha(self, alpha: float) -> Self:
        """Return a layer with the same effect that has this alpha."""
        return replace(self, up=rescaled(self.up, self.alpha, alpha), alpha=alpha)

    def folded(self) -> Self:
        """Return a layer with the same effect whose scale is 1: what files contain."""
        return self.with_alpha(float(self.rank))

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in, ...) as the layer changes it."""
        product = self.up.float().flatten(1) @ self.down.float().flatten(1)
        return weight + (self.scale * product).reshape(weight.shape).to(weight.device)

    def parts(self) -> dict[str, Tensor]:
        """Return the matrices by peft's names for those of linear layers."""
        return {"lora_A.weight": self.down, "lora_B.weight": self.up}


def rescaled(up: Tensor, alpha: float, new_alpha: float) -> Tensor:
    """Return `up` such that the effect with `new_alpha` is that of `up` with `alpha`,
    exactly if their ratio is a power of 2, else rounded to fp32.
    """
    # Files store alpha in fp32.
    if math.isclose(alpha, new_alpha, rel_tol=1e-6):
        return up
    return up.float() * alpha / new_alpha
