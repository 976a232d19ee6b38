"""Qwen-Image's components: how their files are recognised, configured and loaded."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from dstrain.plugin import (
    CheckpointFormat,
    Component,
    DiffusersNetwork,
    Files,
    KeyMap,
    LoraKeyFormat,
    Tokenizer,
    TransformersNetwork,
    same_config,
)

from dstrain_qwen_image.processor import Processor

DIT = DiffusersNetwork("QwenImageTransformer2DModel")
VAE = DiffusersNetwork("AutoencoderKLQwenImage")
TEXT_ENCODER = TransformersNetwork(
    "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"
)

# config.json of Qwen/Qwen-Image's folders, for weights that come without it.
PUBLISHED_DIT = MappingProxyType(
    {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    }
)
PUBLISHED_EDIT_2511_DIT = MappingProxyType({**PUBLISHED_DIT, "zero_cond_t": True})
PUBLISHED_VAE = MappingProxyType(
    {
        "base_dim": 96,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "dropout": 0.0,
        "latents_mean": [
            *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
            *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
        ],
        "latents_std": [
            *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
            *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916),
        ],
    }
)
PUBLISHED_TEXT_ENCODER = MappingProxyType(
    {
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "image_token_id": 151655,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "mrope_section": [16, 24, 24],
            "rope_type": "default",
            "type": "default",
        },
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "video_token_id": 151656,
        "vision_config": {
            "depth": 32,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_channels": 3,
            "intermediate_size": 3420,
            "model_type": "qwen2_5_vl",
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "vocab_size": 152064,
    }
)

# The names of transformers before version 5, as published.
PUBLISHED_TEXT_ENCODER_LAYOUT = CheckpointFormat(
    key_patterns=("model.embed_tokens.weight", "visual.patch_embed.proj.weight"),
    rows=(KeyMap("model.visual", "visual"), KeyMap("model.language_model", "model")),
    configuration=same_config,
)

# comfy/lora.py of ComfyUI, model_lora_keys_clip.
COMFYUI_TEXT_ENCODER_LORA = LoraKeyFormat(
    "comfyui", ("text_encoders.qwen25_7b.transformer.",), PUBLISHED_TEXT_ENCODER_LAYOUT
)

# Models whose text encoder, VAE and (but for the last one's zero_cond_t) transformer
# are alike but for the weights.
IDS = tuple(
    f"Qwen/Qwen-Image{suffix}"
    for suffix in ("", "-2512", "-Edit", "-Edit-2509", "-Edit-2511")
)


def infer_dit(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any] | None:
    """The published transformer's configuration for any number of layers and heads of
    128 channels, from its shapes.
    """
    width, channels = shapes["img_in.weight"]
    head = PUBLISHED_DIT["attention_head_dim"]
    if shapes["transformer_blocks.0.attn.norm_q.weight"] != (head,):
        return None
    return dict(PUBLISHED_DIT) | {
        "in_channels": channels,
        "num_layers": 1
        + max(
            int(n.split(".")[1]) for n in shapes if n.startswith("transformer_blocks.")
        ),
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
    }


def load_processor(files: Files, configuration: Any, dtype: torch.dtype) -> Processor:
    """Load the processor from its folder; it has neither configuration nor dtype."""
    return Processor.from_folder(files.folder)


COMPONENTS: tuple[Component, ...] = (
    Component(
        name="dit",
        folders=("transformer",),
        load=DIT.load,
        key_patterns=(
            "txt_norm.weight",
            "transformer_blocks.*.img_mod.1.weight",
            "proj_out.weight",
        ),
        configure=DIT.configure,
        published=MappingProxyType(
            {
                **dict.fromkeys(IDS, PUBLISHED_DIT),
                "Qwen/Qwen-Image-Edit-2511": PUBLISHED_EDIT_2511_DIT,
            }
        ),
        infer=infer_dit,
        prefixes=("model.diffusion_model.", "diffusion_model."),
    ),
    Component(
        name="text_encoder",
        folders=("text_encoder",),
        load=TEXT_ENCODER.load,
        key_patterns=(
            "model.language_model.embed_tokens.weight",
            "model.visual.patch_embed.proj.weight",
        ),
        formats=(PUBLISHED_TEXT_ENCODER_LAYOUT,),
        lora=(COMFYUI_TEXT_ENCODER_LORA,),
        configure=TEXT_ENCODER.configure,
        published=MappingProxyType(dict.fromkeys(IDS, PUBLISHED_TEXT_ENCODER)),
    ),
    Component(
        name="vae",
        folders=("vae",),
        load=VAE.load,
        key_patterns=(
            "post_quant_conv.weight",
            "encoder.*.gamma",
            "decoder.up_blocks.*",
        ),
        configure=VAE.configure,
        published=MappingProxyType(dict.fromkeys(IDS, PUBLISHED_VAE)),
    ),
    Component(
        name="tokenizer", folders=("tokenizer",), load=Tokenizer("Qwen2Tokenizer").load
    ),
    Component(name="processor", folders=("processor",), load=load_processor),
)
