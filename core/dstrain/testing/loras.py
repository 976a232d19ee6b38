"""Read LoRA files by the published rules of other programs alone, to check a family's
exports.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.lora import LoraConfig, inject
from dstrain.models.formats import CheckpointFormat, from_checkpoint, to_checkpoint

PAIRS = (
    ("lora_down.weight", "lora_up.weight"),
    ("lora_A.weight", "lora_B.weight"),
    ("lora_A.default.weight", "lora_B.default.weight"),
)
"""What the names of a layer's two matrices end with, for the readers named below: (down
or A, up or B).
"""


@dataclass(frozen=True)
class LoraReader:
    """A program that adds LoRAs to its weights.

    The rules: comfy/lora.py and comfy/weight_adapter/lora.py of Comfy-Org/ComfyUI
    (`model_lora_keys_unet`: generic names and `lora_unet_`), networks/ of
    kohya-ss/sd-scripts and musubi-tuner, diffsynth/utils/lora/general.py of
    modelscope/DiffSynth-Studio.
    """

    checkpoint_format: CheckpointFormat | None
    """How the program holds the weights; None: as diffusers does."""
    prefix: str = ""
    """What a layer's key in a LoRA file begins with."""
    underscored: bool = False
    """Whether a layer's key has '_' for each '.' of the weight's name."""

    def layer(self, weight: str) -> str:
        """Return the program's name for the layer of this weight."""
        name = weight.removesuffix(".weight")
        return self.prefix + (name.replace(".", "_") if self.underscored else name)

    def weights(self, network: nn.Module) -> dict[str, Tensor]:
        """Return a network's weights in the program's format, in fp64."""
        state = {name: weight.double() for name, weight in network.state_dict().items()}
        if self.checkpoint_format is None:
            return state
        return to_checkpoint(self.checkpoint_format, state)

    def read(
        self, network: nn.Module, tensors: Mapping[str, Tensor]
    ) -> tuple[nn.Module, list[str]]:
        """Apply a LoRA as the program does; return a copy of the network in fp64 and
        the keys it did not use.
        """
        weights = self.weights(network)
        known = {self.layer(name): name for name in weights if name.endswith(".weight")}
        left = set(tensors)
        for layer, name in known.items():
            for down, up in PAIRS:
                pair = (f"{layer}.{down}", f"{layer}.{up}")
                if not left.issuperset(pair):
                    continue
                below, above = (tensors[key].double() for key in pair)
                alpha = tensors.get(f"{layer}.alpha")
                scale = 1.0 if alpha is None else alpha.item() / len(below)
                weights[name] = weights[name] + scale * (above @ below)
                left -= {*pair, f"{layer}.alpha"}
        if self.checkpoint_format is not None:
            weights = from_checkpoint(self.checkpoint_format, weights)
        changed = deepcopy(network).double()
        changed.load_state_dict(weights)
        return changed, sorted(left)

    def lora(
        self, network: nn.Module, rank: int, alpha: float | None
    ) -> dict[str, Tensor]:
        """Return a LoRA file of the program's own for each linear layer but those tied to
        others, drawn from seed 0.
        """
        state = dict(network.named_parameters())  # those that are tied once
        weights: dict[str, Tensor] = {}
        for layer, module in network.named_modules():
            name = f"{layer}.weight"
            if isinstance(module, nn.Linear) and name in state:
                weights[name] = state[name]
        if self.checkpoint_format is not None:
            weights = to_checkpoint(self.checkpoint_format, weights)
        draw = torch.Generator().manual_seed(0)
        made = {}
        down, up = PAIRS[2 if alpha is None else 0]
        for name, weight in weights.items():
            layer = self.layer(name)
            made[f"{layer}.{down}"] = 0.3 * torch.randn(
                rank, weight.shape[1], generator=draw
            )
            made[f"{layer}.{up}"] = 0.3 * torch.randn(
                weight.shape[0], rank, generator=draw
            )
            if alpha is not None:
                made[f"{layer}.alpha"] = torch.tensor(alpha)
        return made


def trained(
    network: Any, lora_config: LoraConfig, aliases: Mapping[str, tuple[str, ...]]
) -> Any:
    """Add LoRA layers to the network, with nonzero weights drawn from seed 0, and
    return it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject(network, lora_config, aliases)
        with torch.no_grad():
            for name, weight in network.named_parameters():
                if "lora_" in name:
                    weight.normal_(std=0.3)
    return network
