"""Z-Image's components: how their files are recognized, configured and loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Shapes,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
)

from dstrain_z_image import CONTROLNETS, IDS, OMNI

CONFIGS = Path(__file__).parent / "configs"
KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json")
HEAD = 128
"""Channels of a head of the published networks."""
DIT: Mapping[str, Any] = json.loads((CONFIGS / "dit.json").read_bytes())
SIGLIP: Mapping[str, Any] = json.loads((CONFIGS / "image_encoder.json").read_bytes())


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of a transformer with heads of 128 channels, of any depth
    and width.
    """
    if shapes["layers.0.attention.norm_q.weight"] != (HEAD,):
        return None
    width = shapes["all_x_embedder.2-1.weight"][0]
    config: dict[str, Any] = {
        **DIT,
        "dim": width,
        "n_layers": _count(shapes, "layers."),
        "n_refiner_layers": _count(shapes, "noise_refiner."),
        "n_heads": width // HEAD,
        "n_kv_heads": width // HEAD,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
    }
    if "siglip_embedder.1.weight" in shapes:
        config["siglip_feat_dim"] = shapes["siglip_embedder.1.weight"][1]
    return config


def infer_controlnet(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of a ControlNet of version 2.1 with heads of 128 channels:
    its layers are evenly beside the 30 blocks of the published denoiser.
    """
    if shapes["control_layers.0.attention.norm_q.weight"] != (HEAD,):
        return None
    width, inputs = shapes["control_all_x_embedder.2-1.weight"]
    step = DIT["n_layers"] // _count(shapes, "control_layers.")
    return {
        "control_layers_places": list(range(0, DIT["n_layers"], step)),
        "control_in_dim": inputs // 4,
        "dim": width,
        "n_refiner_layers": _count(shapes, "control_noise_refiner."),
        "n_heads": width // HEAD,
        "n_kv_heads": width // HEAD,
    }


def _count(shapes: Shapes, prefix: str) -> int:
    """Return the number of blocks."""
    names = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
    return 1 + max(int(name.split(".")[0]) for name in names)


COMPONENTS = (
    Component(
        "dit",
        network=DiffusersNetwork("ZImageTransformer2DModel"),
        folder="transformer",
        version=1,
        default_configs={
            **dict.fromkeys(IDS, DIT),
            OMNI: {**DIT, "siglip_feat_dim": SIGLIP["hidden_size"]},
        },
        infer=infer_dit,
        as_loaded=(
            *("t_embedder.*", "cap_embedder.*", "all_x_embedder.*"),
            "all_final_layer.*",
        ),
        modulation=("adaLN_modulation.0",),
        **KEY_MAPS["dit"],
    ),
    Component(
        "controlnet",
        network=DiffusersNetwork("dstrain_z_image.controlnet:ControlNet"),
        folder="controlnet",
        version=1,
        original_filenames=("Z-Image-*Fun-Controlnet-*",),
        default_configs={model_id: {} for model_id in CONTROLNETS},
        infer=infer_controlnet,
        as_loaded=("control_all_x_embedder.*",),
        modulation=("adaLN_modulation.0",),
        **KEY_MAPS["controlnet"],
    ),
    Component(
        "text_encoder",
        network=TransformersNetwork("Qwen3ForCausalLM", "Qwen3Config"),
        folder="text_encoder",
        version=1,
        default_configs=dict.fromkeys(IDS, CONFIGS / "text_encoder.json"),
        **KEY_MAPS["text_encoder"],
    ),
    Component(
        "image_encoder",
        network=TransformersNetwork("Siglip2VisionModel", "Siglip2VisionConfig"),
        folder="siglip",
        version=1,
        default_configs={OMNI: SIGLIP},
        **KEY_MAPS["image_encoder"],
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKL"),
        folder="vae",
        version=1,
        default_configs=dict.fromkeys(IDS, CONFIGS / "vae.json"),
        **KEY_MAPS["vae"],
    ),
    Component(
        "tokenizer", network=Tokenizer("Qwen2Tokenizer"), folder="tokenizer", version=1
    ),
)
