"""Qwen-Image's components: how their files are recognized, configured and loaded."""

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

from dstrain_qwen_image import CONTROLNETS, IDS, LAYERED_IDS

CONFIGS = Path(__file__).parent / "configs"
KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json")


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the published transformer's configuration for any number of layers and
    heads of 128 channels.
    """
    config: dict[str, Any] = json.loads((CONFIGS / "dit.json").read_bytes())
    head = config["attention_head_dim"]
    if shapes["transformer_blocks.0.attn.norm_q.weight"] != (head,):
        return None
    width, channels = shapes["img_in.weight"]
    blocks = [name for name in shapes if name.startswith("transformer_blocks.")]
    if "time_text_embed.addition_t_embedding.weight" in shapes:
        config |= {"use_additional_t_cond": True, "use_layer3d_rope": True}
    return config | {
        "in_channels": channels,
        "num_layers": 1 + max(int(name.split(".")[1]) for name in blocks),
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
    }


def infer_controlnet(shapes: Shapes) -> Mapping[str, Any]:
    """Return the configuration of a published blockwise ControlNet, which has none."""
    width, channels = shapes["img_in.weight"]
    blocks = [name for name in shapes if name.endswith("x_rms.weight")]
    return {"num_layers": len(blocks), "in_channels": channels, "width": width}


COMPONENTS = (
    Component(
        "dit",
        network=DiffusersNetwork("QwenImageTransformer2DModel"),
        folder="transformer",
        version=1,
        default_configs={
            **dict.fromkeys(IDS, CONFIGS / "dit.json"),
            "Qwen/Qwen-Image-Edit-2511": CONFIGS / "dit_edit_2511.json",
            **dict.fromkeys(LAYERED_IDS, CONFIGS / "dit_layered.json"),
        },
        infer=infer_dit,
        as_loaded=("time_text_embed.*", "img_in", "txt_in", "norm_out.*", "proj_out"),
        modulation=("img_mod.1", "txt_mod.1"),
        **KEY_MAPS["dit"],
    ),
    Component(
        "text_encoder",
        network=TransformersNetwork(
            "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"
        ),
        folder="text_encoder",
        version=1,
        as_loaded=("lm_head",),
        default_configs=dict.fromkeys(
            (*IDS, *LAYERED_IDS), CONFIGS / "text_encoder.json"
        ),
        **KEY_MAPS["text_encoder"],
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKLQwenImage"),
        folder="vae",
        version=1,
        default_configs={
            **dict.fromkeys(IDS, CONFIGS / "vae.json"),
            **dict.fromkeys(LAYERED_IDS, CONFIGS / "vae_layered.json"),
        },
        **KEY_MAPS["vae"],
    ),
    Component(
        "blockwise_controlnet",
        network=DiffusersNetwork("dstrain_qwen_image.controlnet:BlockwiseControlNet"),
        folder="blockwise_controlnet",
        version=1,
        original_filenames=("model.safetensors",),
        default_configs={
            CONTROLNETS + kind: {
                "num_layers": 60,
                "in_channels": channels,
                "width": 3072,
            }
            for kind, channels in (("Canny", 64), ("Depth", 64), ("Inpaint", 68))
        },
        infer=infer_controlnet,
        as_loaded=("img_in",),
        **KEY_MAPS["blockwise_controlnet"],
    ),
    Component(
        "tokenizer", network=Tokenizer("Qwen2Tokenizer"), folder="tokenizer", version=1
    ),
    Component(
        "processor",
        network=Tokenizer("dstrain_qwen_image.processor:Processor"),
        folder="processor",
        version=1,
    ),
)
