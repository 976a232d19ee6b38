"""A family for tests of LoRA files: a denoiser whose original files have fused layers,
a second expert, and a text encoder.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from dstrain import LoraConfig, save_lora
from dstrain.config import LoraFile
from dstrain.lora import Lora, base_shapes, inject, lora_state, merge, read_lora
from dstrain.lora.layers import LoraLayer
from dstrain.plugin import (
    CheckpointFormat,
    Component,
    DiffusersNetwork,
    KeyMap,
    LoraKeyFormat,
    ModelFamily,
)
from safetensors.torch import save_file
from torch import Tensor, nn


class Attention(nn.Module):
    """Queries, keys and values from tokens; rows of `to_out` are a list's first part,
    as diffusers has it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) -> the same shape."""
        found: Tensor = self.to_out[0](
            (self.to_q(x) @ self.to_k(x).T).softmax(-1) @ self.to_v(x)
        )
        return found


class Block(nn.Module):
    """Attention, and a part that the last block makes no use of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.text = Attention(width), nn.Linear(width, width)


class Net(nn.Module):
    """(tokens, 3) -> the same shape; `norm_out.linear` gives scale, then shift: the
    original the other way round.
    """

    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.proj_in = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm_out = nn.ModuleDict({"linear": nn.Linear(width, 2 * width)})
        self.proj_out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, 3) -> (tokens, 3)."""
        x = self.proj_in(x)
        text = x
        for block in self.blocks:
            x, text = x + block.attn(x + text), text + block.text(text)
        scale, shift = self.norm_out["linear"](x).chunk(2, -1)
        out: Tensor = self.proj_out(x * (1 + scale) + shift)
        return out


class Encoder(nn.Module):
    """A text encoder of one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"q_proj": nn.Linear(width, width)})]
        )


ORIGINAL = CheckpointFormat(
    key_patterns=("img_in.weight", "double.*.qkv.weight"),
    rows=(
        KeyMap("proj_in", "img_in"),
        *(
            KeyMap(f"blocks.*.attn.to_{part}", "double.*.qkv", i, i + 1, 3)
            for i, part in enumerate("qkv")
        ),
        KeyMap("blocks.*.attn.to_out.0", "double.*.proj"),
        KeyMap("blocks.*.text", "double.*.txt"),
        KeyMap("norm_out.linear", "final.mod", 1, 2, 2),
        KeyMap("norm_out.linear", "final.mod", 0, 1, 2),
        KeyMap("proj_out", "final.linear"),
    ),
)
REFERENCE = CheckpointFormat(
    key_patterns=(),
    rows=(
        KeyMap("blocks.*.attn.to_out.0", "layers.*.o"),
        KeyMap("blocks.*.attn.to_q", "layers.*.q"),
    ),
)
MARKS = ("proj_in.weight", "blocks.*.attn.to_q.weight")
DIT, ENCODER = (
    DiffusersNetwork(f"{__name__}:Net"),
    DiffusersNetwork(f"{__name__}:Encoder"),
)
PUBLISHED = MappingProxyType({"Some/Model": MappingProxyType({"width": 6})})


def _denoiser(name: str) -> Component:
    return Component(
        name,
        DIT,
        name,
        MARKS,
        default_configs=PUBLISHED,
        formats=(ORIGINAL,),
        prefixes=("model.diffusion_model.", "diffusion_model."),
        lora=(LoraKeyFormat("diffsynth", ("", f"pipe.{name}."), REFERENCE),),
    )


COMPONENTS = (
    _denoiser("dit"),
    _denoiser("dit2"),
    Component(
        "text_encoder",
        ENCODER,
        "text_encoder",
        ("layers.*.q_proj.weight",),
        default_configs=PUBLISHED,
        lora=(LoraKeyFormat("kohya", ("lora_te1_", "lora_te_"), underscored=True),),
    ),
)
MODEL = ModelFamily(
    "fused",
    "",
    f"{__name__}:COMPONENTS",
    "",
    ("base",),
    "dit",
    MappingProxyType({"dit": ("to_q",)}),
    MappingProxyType(
        {"dit": "transformer", "dit2": "transformer", "text_encoder": "text_encoder"}
    ),
    api=2,
)
TOKENS = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def network(kind: Any = Net) -> Any:
    """A network of width 6, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(6)


def trained(lora_config: LoraConfig, kind: Any = Net) -> Any:
    """A network with LoRA layers of which no weight is zero."""
    module = network(kind)
    inject(module, lora_config, {})
    draw = torch.Generator().manual_seed(3)
    for tensor in lora_state(module).values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=draw))
    return module


@torch.no_grad()
def output(module: Any) -> Tensor:
    """What a denoiser makes of the same tokens."""
    made: Tensor = module(TOKENS)
    return made


SHAPES = base_shapes(network())
ENCODER_SHAPES = base_shapes(network(Encoder))

SPEC = LoraConfig(
    "dit",
    ("to_q", "to_k", "to_v", "to_out.0", "text", "norm_out.linear", "proj_in"),
    4,
    6.0,
)
Tensors = dict[str, Tensor]
Header = dict[str, str]
Change = Callable[[Tensors], Tensors]


def ours(
    folder: Path, lora_config: LoraConfig = SPEC, **about: str
) -> tuple[Path, Any]:
    """A LoRA file as a run writes it, and the network that was trained."""
    module = trained(lora_config)
    path = folder / "ours.safetensors"
    save_lora(path, module, lora_config, "transformer", {"family": "fused", **about})
    return path, module


def as_trained(lora_config: LoraConfig = SPEC) -> Tensors:
    """The matrices of `ours` without alpha / rank in them, as other programs and earlier
    versions write them.
    """
    state = lora_state(trained(lora_config))
    return {f"transformer.{name}": value for name, value in state.items()}


def written(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None
) -> Path:
    save_file(
        {key: tensor.clone() for key, tensor in tensors.items()},
        path,
        dict(header or {}),
    )
    return path


def read(path: Path, **networks: Any) -> Lora:
    """The one LoRA that a file holds, for the denoiser by default."""
    (found,) = read_lora(LoraFile(path), MODEL, networks or {"dit": SHAPES})
    return found


def merge_layers(module: Any, layers: Mapping[str, Any], strength: float = 1.0) -> None:
    """Merge layers into the weights that they are for."""
    merge(module, {f"{name}.weight": one for name, one in layers.items()}, strength)


def adapter(**fields: Any) -> Header:
    """A header as diffusers writes it."""
    given = {"r": 4, "lora_alpha": 6.0, "target_modules": ["to_q"], **fields}
    return {
        "lora_adapter_metadata": json.dumps(
            {f"transformer.{name}": value for name, value in given.items()}
        )
    }


def same(one: Mapping[str, LoraLayer], other: Mapping[str, LoraLayer]) -> bool:
    """Whether two sets of layers are equal to the bit."""
    pairs = [(one[name], other[name]) for name in one.keys() & other.keys()]
    return one.keys() == other.keys() and all(
        torch.equal(a.down, b.down) and torch.equal(a.up, b.up) and a.alpha == b.alpha
        for a, b in pairs
    )


def down_up(tensors: Tensors) -> Tensors:
    """The other names of A and B."""
    return {
        k.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): v
        for k, v in tensors.items()
    }


def with_alpha(tensors: Tensors, alpha: float = 6.0) -> Tensors:
    """With a key for alpha beside each pair."""
    layers = {key.split(".lora_")[0] for key in tensors}
    return tensors | {f"{layer}.alpha": torch.tensor(alpha) for layer in layers}


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {
        key.replace("transformer.", prefix, 1): value for key, value in tensors.items()
    }


def folded(tensors: Tensors) -> Tensors:
    """alpha / rank as part of B: what a file without alpha must have."""
    return {
        key: value * 1.5 if "lora_B" in key else value for key, value in tensors.items()
    }


def default_names(tensors: Tensors) -> Tensors:
    """With the adapter's name in each key, as peft has it in memory."""
    return {
        k.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."): v
        for k, v in tensors.items()
    }
