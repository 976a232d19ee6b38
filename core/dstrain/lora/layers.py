"""The LoRA layers to train, and the LoRA of one layer.

LoRA (Hu et al. 2021, "LoRA: low-rank adaptation of large language models"):
y = W x + (alpha / rank) B A x. DoRA (Liu et al. 2024, "DoRA: weight-decomposed low-rank
adaptation"): the rows of W + (alpha / rank) B A get lengths that are trained, too.
"""

import math
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dstrain.config.layer_numbers import parse_alphas, parse_ranks
from dstrain.config.options import DEFAULT_RANK, LoraOptions, LoraType

EARLIER = MappingProxyType(
    {"ranks": (), "alphas": (), "type": "lora", "dropout": 0.0, "factor": -1}
)
"""Fields of a LoraConfig that were added later -> what all layers had before."""


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
    """Patterns of `lora.patterns` with the ranks of the layers that they match."""
    alphas: tuple[tuple[str, float], ...] = ()
    """The same with alphas."""
    type: LoraType = "lora"
    dropout: float = 0.0
    """Of the layers' input, in training."""
    factor: int = -1
    """Rows and columns of the first matrix of a LoKr; -1: about those of the second."""

    @classmethod
    def of(
        cls, options: LoraOptions, component: str, targets: tuple[str, ...]
    ) -> "LoraConfig":
        """Return what a run's options ask for; raises UsageError for a value that cannot
        be parsed.
        """
        ranks = parse_ranks(options.lora_rank)
        alphas = parse_alphas(options.lora_alpha)
        rank = DEFAULT_RANK if ranks.others is None else ranks.others
        alpha = alphas.others
        if alpha is None and not ranks.by_pattern:
            alpha = float(rank)
        return cls(
            component,
            targets,
            rank,
            alpha if alpha is None else float(alpha),
            ranks.by_pattern,
            alphas.by_pattern,
            options.lora_type,
            options.lora_dropout,
            options.lokr_factor or -1,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Return what decides the layers, without what earlier versions did not know
        where that is as it was.
        """
        found = asdict(self)
        for name, earlier in EARLIER.items():
            if found[name] == earlier:
                del found[name]
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


@dataclass(frozen=True)
class LoraLayer:
    """The LoRA of one layer: (alpha / rank) up down. With a magnitude, it is DoRA."""

    down: Tensor
    """(rank, in), followed by the kernel's axes for a convolution. The `in` of an
    embedding is its vocabulary.
    """
    up: Tensor
    """(out, rank)."""
    alpha: float
    magnitude: Tensor | None = None
    """(out,): the lengths of the rows of the changed weight."""

    @property
    def type(self) -> LoraType:
        """Return what `--lora_type` trains such layers."""
        return "lora" if self.magnitude is None else "dora"

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

    def with_alpha(self, alpha: float) -> "LoraLayer":
        """Return a layer with the same effect that has this alpha."""
        return replace(self, up=rescaled(self.up, self.alpha, alpha), alpha=alpha)

    def folded(self) -> "LoraLayer":
        """Return a layer with the same effect whose scale is 1: what files contain."""
        return self.with_alpha(float(self.rank))

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in, ...) as the layer changes it."""
        total = self._added(weight)
        if self.magnitude is None:
            return total
        return (self._magnitude_on(weight) / row_lengths(total))[:, None] * total

    def at_strength(self, weight: Tensor, strength: float) -> "LoraLayer":
        """Return a DoRA layer whose change of this fp32 weight is `strength` times this
        one's: peft would scale the product alone, and not what the lengths change.
        """
        ratio = strength * self._magnitude_on(weight) / row_lengths(self._added(weight))
        # W + s (m / n (W + BA) - W) = (1 - s + s m / n) W + (s m / n) BA
        own = 1 - strength + ratio
        up = self.up.float() * (ratio / own)[:, None].to(self.up.device)
        scaled = replace(self, up=up)
        magnitude = own * row_lengths(scaled._added(weight))
        return replace(scaled, magnitude=magnitude)

    def _added(self, weight: Tensor) -> Tensor:
        product = self.up.float().flatten(1) @ self.down.float().flatten(1)
        return weight + (self.scale * product).reshape(weight.shape).to(weight.device)

    def _magnitude_on(self, weight: Tensor) -> Tensor:
        assert self.magnitude is not None
        return self.magnitude.float().to(weight.device)


def row_lengths(weight: Tensor) -> Tensor:
    """Return the length of each row (out,) of a weight (out, in)."""
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return lengths


def rescaled(up: Tensor, alpha: float, new_alpha: float) -> Tensor:
    """Return `up` such that the effect with `new_alpha` is that of `up` with `alpha`,
    exactly if their ratio is a power of 2, else rounded to fp32.
    """
    # Files store alpha in fp32.
    if math.isclose(alpha, new_alpha, rel_tol=1e-6):
        return up
    return up.float() * alpha / new_alpha
