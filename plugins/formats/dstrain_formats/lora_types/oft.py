"""The OFT of one layer.

OFT (Qiu et al. 2023, "Controlling text-to-image diffusion by orthogonal finetuning"): what
a layer takes is rotated, block of channels by block; a rotation is (I + S)^-1 (I - S) of
a skew-symmetric S. Here the rank is the number of channels of a block, and there is no
alpha.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from dstrain.plugin import UsageError
from dstrain.plugin.lora import Layer
from torch import Tensor, nn

from dstrain_formats.lora_types.loha import LinearType


@dataclass(frozen=True)
class OftLayer(Layer):
    """The OFT of one layer."""

    numbers: Tensor
    """(blocks, n (n - 1) / 2): what is above the diagonal of each S (n, n)."""

    type = "oft"

    @property
    def rank(self) -> int:
        """Return the channels of a block."""
        return (1 + isqrt(1 + 8 * self.numbers.shape[1])) // 2

    @property
    def acts(self) -> bool:
        """Return whether it changes a weight."""
        return bool(self.numbers.any())

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it is for a weight of this shape."""
        return len(shape) == 2 and len(self.numbers) * self.rank == shape[1]

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in) as the layer changes it."""
        size = self.rank
        rows, columns = torch.triu_indices(size, size, 1)
        skew = torch.zeros(len(self.numbers), size, size)
        skew[:, rows, columns] = self.numbers.detach().float().cpu()
        skew = skew - skew.transpose(1, 2)
        one = torch.eye(size)
        rotations = torch.linalg.solve(one + skew, one - skew, left=False)
        blocks = weight.reshape(len(weight), len(rotations), size)
        made = torch.einsum("oki,kji->okj", blocks, rotations.to(weight.device))
        return made.flatten(1)

    def parts(self) -> dict[str, Tensor]:
        """Return the numbers by peft's name."""
        return {"oft_R.weight": self.numbers}


class OftType(LinearType):
    """OFT by peft."""

    name = "oft"
    keys = r"oft_R\.weight"
    kind = "OFTConfig"
    merged = True

    def configured(self, numbers: dict[str, Any], settings: Mapping[str, Any]) -> Any:
        """Return peft's OFTConfig, with exact rotations."""
        if numbers["rank_pattern"] or numbers["alpha_pattern"]:
            what = "oft has one size of blocks for all layers"
            raise UsageError("--lora_rank", what, "give one number")
        if numbers["lora_alpha"] != numbers["r"]:
            raise UsageError("--lora_alpha", "has no effect with --lora_type oft")
        return self.in_peft(
            r=0,
            oft_block_size=numbers["r"],
            use_cayley_neumann=False,
            target_modules=numbers["target_modules"],
        )

    def numbers_of(self, wrapped: Any, adapter: str) -> tuple[int, float]:
        """Return the channels of a block, twice."""
        size = wrapped.oft_block_size[adapter]
        return size, float(size)

    def layer(
        self, parts: Mapping[str, Tensor], rank: int | None, alpha: float | None
    ) -> OftLayer:
        """Return a layer of its numbers; raises ValueError for other parts."""
        numbers = parts.get("oft_R.weight")
        if numbers is None or numbers.ndim != 2:
            raise ValueError("lack the numbers of OFT")
        return OftLayer(numbers)

    def check(self, ranks: Mapping[str, int], network: nn.Module, flag: str) -> None:
        """Refuse blocks that do not divide what a layer takes."""
        for name, size in ranks.items():
            layer: Any = network.get_submodule(name)
            width = getattr(layer, "base_layer", layer).in_features
            if size < 2 or width % size:
                what = f"oft needs blocks of 2 or more channels that divide those of each layer: {name} has {width}"
                raise UsageError("--lora_rank", what)


TYPE = OftType()
