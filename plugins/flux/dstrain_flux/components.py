"""FLUX's components: how their files are recognized, configured and loaded."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    LoraKeyFormat,
    Shapes,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
)

from dstrain_flux import REDUX, SIGLIP, TRANSFORMERS

CONFIGS = Path(__file__).parent / "configs"


def vision_config(
    config: Mapping[str, Any], shapes: Shapes
) -> Mapping[str, Any] | None:
    """Return the configuration of a SigLIP's vision half; None for another network's."""
    is_siglip = config.get("model_type") == "siglip"
    return config["vision_config"] if is_siglip else None


KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json", {"vision": vision_config})


# A ControlNet's blocks have the names of the denoiser's.
DIFFSYNTH_CONTROLNET = replace(
    KEY_MAPS["dit"]["formats"][1],
    key_patterns=("controlnet_x_embedder.weight", "blocks.*.attn.a_to_qkv.weight"),
)
# Where they differ from the defaults of the class; all have embedded guidance, as the
# names of their weights say.
CONTROLNETS = json.loads((CONFIGS / "controlnets.json").read_bytes())


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of a transformer with heads of 128 channels, of any
    depth and width.
    """
    config: dict[str, Any] = json.loads((CONFIGS / "dit.json").read_bytes())
    head = config["attention_head_dim"]
    if shapes["transformer_blocks.0.attn.norm_q.weight"] != (head,):
        return None
    embedder = "time_text_embed"
    width, channels = shapes["x_embedder.weight"]
    out_channels = shapes["proj_out.weight"][0]
    config |= {
        "in_channels": channels,
        "num_layers": _count(shapes, "transformer_blocks."),
        "num_single_layers": _count(shapes, "single_transformer_blocks."),
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes[f"{embedder}.text_embedder.linear_1.weight"][1],
        "guidance_embeds": f"{embedder}.guidance_embedder.linear_1.weight" in shapes,
    }
    if out_channels != channels:
        config["out_channels"] = out_channels
    return config


def infer_controlnet(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of a ControlNet with heads of 128 channels, of any depth
    and width.
    """
    # It has the denoiser's layers but the last, whose shape is that of the first.
    config = infer_dit({**shapes, "proj_out.weight": shapes["x_embedder.weight"][::-1]})
    if config is None:
        return None
    found = dict(config)
    channels = found["in_channels"]
    extra = shapes["controlnet_x_embedder.weight"][1] - channels
    if extra:
        found["extra_condition_channels"] = extra
    if "controlnet_mode_embedder.weight" in shapes:
        found["num_mode"] = shapes["controlnet_mode_embedder.weight"][0]
    return found


def infer_ipadapter(shapes: Shapes) -> Mapping[str, Any]:
    """Return the configuration of an IP-Adapter of any size."""
    hidden_size, channels = shapes["ip_adapter.0.to_k_ip.weight"]
    return {
        "hidden_size": hidden_size,
        "cross_attention_dim": channels,
        "image_dim": shapes["image_proj.proj.0.weight"][1],
        "num_tokens": shapes["image_proj.proj.2.weight"][0] // channels,
        "num_blocks": _count(shapes, "ip_adapter."),
    }


def _count(shapes: Shapes, prefix: str) -> int:
    """Return the number of blocks."""
    names = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
    return 1 + max((int(name.split(".")[0]) for name in names), default=-1)


COMPONENTS = (
    Component(
        "dit",
        network=DiffusersNetwork("FluxTransformer2DModel"),
        folder="transformer",
        version=1,
        default_configs={
            **dict.fromkeys(TRANSFORMERS, CONFIGS / "dit.json"),
            "black-forest-labs/FLUX.1-Fill-dev": CONFIGS / "dit_fill.json",
            "black-forest-labs/FLUX.1-schnell": CONFIGS / "dit_schnell.json",
        },
        infer=infer_dit,
        original_filenames=("flux1-*",),
        as_loaded=(
            *("time_text_embed.*", "context_embedder", "x_embedder"),
            *("norm_out.*", "proj_out"),
        ),
        modulation=("norm1.linear", "norm1_context.linear", "norm.linear"),
        **KEY_MAPS["dit"],
    ),
    Component(
        "controlnet",
        network=DiffusersNetwork("dstrain_flux.networks:FluxControlNetModel"),
        folder="controlnet",
        version=1,
        default_configs=CONTROLNETS,
        infer=infer_controlnet,
        as_loaded=(
            *("time_text_embed.*", "context_embedder", "x_embedder"),
            *(
                "controlnet_x_embedder",
                "controlnet_blocks.*",
                "controlnet_single_blocks.*",
            ),
        ),
        modulation=("norm1.linear", "norm1_context.linear", "norm.linear"),
        key_patterns=("controlnet_x_embedder.weight", "context_embedder.weight"),
        formats=(DIFFSYNTH_CONTROLNET,),
        lora=(
            LoraKeyFormat("diffusers", is_loaded=False),
            LoraKeyFormat(
                "diffsynth",
                ("", "pipe.controlnet.models.0.", "pipe.controlnet."),
                DIFFSYNTH_CONTROLNET,
            ),
        ),
    ),
    Component(
        "ipadapter",
        network=DiffusersNetwork("dstrain_flux.networks:FluxIPAdapter"),
        folder="ipadapter",
        version=1,
        default_configs={"InstantX/FLUX.1-dev-IP-Adapter": {}},
        infer=infer_ipadapter,
        original_filenames=("ip-adapter*",),
        **KEY_MAPS["ipadapter"],
    ),
    Component(
        "text_encoder_1",
        network=TransformersNetwork("CLIPTextModel", "CLIPTextConfig"),
        folder="text_encoder",
        version=1,
        default_configs=dict.fromkeys(TRANSFORMERS, CONFIGS / "text_encoder.json"),
        **KEY_MAPS["text_encoder_1"],
    ),
    Component(
        "text_encoder_2",
        network=TransformersNetwork("T5EncoderModel", "T5Config"),
        folder="text_encoder_2",
        version=1,
        default_configs=dict.fromkeys(TRANSFORMERS, CONFIGS / "text_encoder_2.json"),
        **KEY_MAPS["text_encoder_2"],
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKL"),
        folder="vae",
        version=1,
        default_configs=dict.fromkeys(TRANSFORMERS, CONFIGS / "vae.json"),
        original_filenames=("ae.*",),
        **KEY_MAPS["vae"],
    ),
    Component(
        "image_encoder",
        network=TransformersNetwork("SiglipVisionModel", "SiglipVisionConfig"),
        folder="image_encoder",
        version=1,
        default_configs=dict.fromkeys((REDUX, SIGLIP), CONFIGS / "image_encoder.json"),
        **KEY_MAPS["image_encoder"],
    ),
    Component(
        "redux",
        network=DiffusersNetwork(
            "diffusers.pipelines.flux.modeling_flux:ReduxImageEncoder"
        ),
        folder="image_embedder",
        version=1,
        default_configs={REDUX: {"redux_dim": 1152, "txt_in_features": 4096}},
        **KEY_MAPS["redux"],
    ),
    Component(
        "tokenizer_1", network=Tokenizer("CLIPTokenizer"), folder="tokenizer", version=1
    ),
    Component(
        "tokenizer_2", network=Tokenizer("T5Tokenizer"), folder="tokenizer_2", version=1
    ),
)
