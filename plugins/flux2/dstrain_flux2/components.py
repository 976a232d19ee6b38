"""FLUX.2's components: how their files are recognized, configured and loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Shapes,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
)
from torch import nn

from dstrain_flux2 import BASE_4B, BASE_9B, DEV, KLEIN_4B, KLEIN_9B, MODEL_FILES

CONFIGS = Path(__file__).parent / "configs"
ENCODERS = {
    "mistral3": TransformersNetwork(
        "Mistral3ForConditionalGeneration", "Mistral3Config"
    ),
    "qwen3": TransformersNetwork("Qwen3ForCausalLM", "Qwen3Config"),
}
"""Type in config.json -> the text encoder."""


class TextEncoder(TransformersNetwork):
    """The text encoder that its config.json says."""

    def accepts_config(self, data: Mapping[str, Any]) -> bool:
        """Return whether the content of a `config.json` is that of one of them."""
        return data.get("model_type") in ENCODERS and "_class_name" not in data

    def configure(self, data: Mapping[str, Any]) -> Any:
        """Return the content of `config.json` as the configuration record."""
        return ENCODERS[data["model_type"]].configure(data)

    def build(self, configuration: Any) -> nn.Module:
        """Build the network for a configuration record, its weights random."""
        return ENCODERS[configuration.model_type].build(configuration)


class Vae(DiffusersNetwork):
    """The VAE, whose statistics are weights."""

    def build(self, configuration: Any) -> nn.Module:
        """Build the network for a configuration, its weights random, and statistics such that
        no channel is normalized by chance.
        """
        network: Any = super().build(configuration)
        channels = network.bn.num_features
        network.bn.running_mean.copy_(torch.linspace(-1, 1, channels))
        network.bn.running_var.copy_(torch.linspace(0.5, 2, channels))
        return network


KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json")


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of a transformer with heads of 128 channels, of any depth
    and width.
    """
    config: dict[str, Any] = json.loads((CONFIGS / "dit.json").read_bytes())
    head = config["attention_head_dim"]
    if shapes["transformer_blocks.0.attn.norm_q.weight"] != (head,):
        return None
    width, channels = shapes["x_embedder.weight"]
    embedder = "time_guidance_embed.guidance_embedder.linear_1.weight"
    return config | {
        "in_channels": channels,
        "num_layers": _count(shapes, "transformer_blocks."),
        "num_single_layers": _count(shapes, "single_transformer_blocks."),
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "guidance_embeds": embedder in shapes,
    }


def _count(shapes: Shapes, prefix: str) -> int:
    """Return the number of blocks."""
    names = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
    return 1 + max(int(name.split(".")[0]) for name in names)


COMPONENTS = (
    Component(
        "dit",
        network=DiffusersNetwork("Flux2Transformer2DModel"),
        folder="transformer",
        version=1,
        default_configs={
            DEV: CONFIGS / "dit.json",
            **dict.fromkeys((KLEIN_4B, BASE_4B), CONFIGS / "dit_klein_4b.json"),
            **dict.fromkeys((KLEIN_9B, BASE_9B), CONFIGS / "dit_klein_9b.json"),
        },
        infer=infer_dit,
        original_filenames=("flux2-*", "flux-2-*"),
        as_loaded=(
            *("time_guidance_embed.*", "context_embedder", "x_embedder"),
            *("norm_out.*", "proj_out"),
        ),
        modulation=(
            "double_stream_modulation_img.linear",
            "double_stream_modulation_txt.linear",
            "single_stream_modulation.linear",
        ),
        **KEY_MAPS["dit"],
    ),
    Component(
        "text_encoder",
        network=TextEncoder("AutoModel", "AutoConfig"),
        folder="text_encoder",
        version=1,
        default_configs={
            DEV: CONFIGS / "mistral.json",
            **dict.fromkeys((KLEIN_4B, BASE_4B), CONFIGS / "qwen3_4b.json"),
            **dict.fromkeys((KLEIN_9B, BASE_9B), CONFIGS / "qwen3_8b.json"),
        },
        as_loaded=("lm_head",),
        **KEY_MAPS["text_encoder"],
    ),
    Component(
        "vae",
        network=Vae("AutoencoderKLFlux2"),
        folder="vae",
        version=1,
        default_configs={model_id: {} for model_id in MODEL_FILES},
        original_filenames=("ae.*", "flux2-vae*"),
        **KEY_MAPS["vae"],
    ),
    Component(
        "tokenizer",
        network=Tokenizer("PreTrainedTokenizerFast"),
        folder="tokenizer",
        version=1,
    ),
)
