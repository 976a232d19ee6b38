"""LoRA files as other programs read them, by their published rules alone: what a
family's exports are held against.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.lora.layers import LoraConfig, inject
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
class Reader:
    """A program that adds LoRAs to the weights it has.

    layout: how it has them; None: as diffusers. prefix, flat: what it calls a layer in
    a LoRA file: the prefix, then the weight's name without `.weight`, where `flat` with
    '_' for each '.'. The rules: comfy/lora.py and comfy/weight_adapter/lora.py of
    Comfy-Org/ComfyUI (`model_lora_keys_unet`: generic names and `lora_unet_`),
    networks/ of kohya-ss/sd-scripts and musubi-tuner, diffsynth/utils/lora/general.py
    of modelscope/DiffSynth-Studio.
    """

    checkpoint_format: CheckpointFormat | None
    prefix: str = ""
    underscored: bool = False

    def layer(self, weight: str) -> str:
        """What it calls the layer of this weight."""
        name = weight.removesuffix(".weight")
        return self.prefix + (name.replace(".", "_") if self.underscored else name)

    def weights(self, network: nn.Module) -> dict[str, Tensor]:
        """A network's weights as the program has them, in fp64."""
        state = {name: weight.double() for name, weight in network.state_dict().items()}
        return (
            state
            if self.checkpoint_format is None
            else to_checkpoint(self.checkpoint_format, state)
        )

    def read(
        self, network: nn.Module, tensors: Mapping[str, Tensor]
    ) -> tuple[nn.Module, list[str]]:
        """What the program makes of the network and a LoRA: a copy of it in fp64, and
        the keys it had no use for.
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
        changed = deepcopy(network).double()
        changed.load_state_dict(
            weights
            if self.checkpoint_format is None
            else from_checkpoint(self.checkpoint_format, weights)
        )
        return changed, sorted(left)

    def lora(
        self, network: nn.Module, rank: int, alpha: float | None
    ) -> dict[str, Tensor]:
        """A LoRA file of the program's own, of each linear layer that it has, drawn
        from seed 0.
        """
        linear = {
            f"{name}.weight"
            for name, layer in network.named_modules()
            if isinstance(layer, nn.Linear)
        }
        state = {
            name: weight
            for name, weight in network.state_dict().items()
            if name in linear
        }
        draw = torch.Generator().manual_seed(0)
        made = {}
        down, up = PAIRS[2 if alpha is None else 0]
        for name, weight in (
            state
            if self.checkpoint_format is None
            else to_checkpoint(self.checkpoint_format, state)
        ).items():
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
    """The network itself, with LoRA layers none of whose weights is zero, drawn from
    seed 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject(network, lora_config, aliases)
        with torch.no_grad():
            for name, weight in network.named_parameters():
                if "lora_" in name:
                    weight.normal_(std=0.3)
    return network
