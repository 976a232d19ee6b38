"""Wan's components: how their files are recognized, configured and loaded."""

import json
from collections.abc import Mapping
from math import prod
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

CONFIGS = Path(__file__).parent / "configs"
HEAD = 128
"""Channels of an attention head, in every published transformer."""
EMBEDDER = "condition_embedder"
DIT_CONFIGS = {
    "Wan2.1-T2V-1.3B": "dit_t2v_1_3b.json",
    "Wan2.1-T2V-14B": "dit_t2v_14b.json",
    "Wan2.1-I2V-14B-480P": "dit_i2v_14b.json",
    "Wan2.1-I2V-14B-720P": "dit_i2v_14b.json",
    "Wan2.2-T2V-A14B": "dit_t2v_14b.json",
    "Wan2.2-I2V-A14B": "dit_i2v_a14b.json",
    "Wan2.2-TI2V-5B": "dit_ti2v_5b.json",
}
VAE_CONFIGS = {
    name: "vae_2_2.json" if name == "Wan2.2-TI2V-5B" else "vae_2_1.json"
    for name in DIT_CONFIGS
}
IMAGE_TO_VIDEO = ("Wan2.1-I2V-14B-480P", "Wan2.1-I2V-14B-720P")


def of_published(configs: Mapping[str, str]) -> Mapping[str, Path]:
    """Return model id -> file, for the published models in their original format and in
    that of diffusers.
    """
    return {
        f"Wan-AI/{name}{suffix}": CONFIGS / config
        for name, config in configs.items()
        for suffix in ("", "-Diffusers")
    }


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of a transformer with heads of 128 channels, as all
    published ones have.
    """
    width, channels, *patch = shapes["patch_embedding.weight"]
    if width % HEAD:
        return None
    blocks = [name for name in shapes if name.startswith("blocks.")]
    return {
        **_dit_config(shapes),
        "patch_size": patch,
        "num_attention_heads": width // HEAD,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // prod(patch),
        "freq_dim": shapes[f"{EMBEDDER}.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": 1 + max(int(name.split(".")[1]) for name in blocks),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
    }


def original_config(
    config: Mapping[str, Any], shapes: Shapes
) -> Mapping[str, Any] | None:
    """Return config.json of the original repositories in the terms of diffusers; None
    for another component's.

    Patches, norms and the widths of text and image features, which the original leaves
    to its code, are as published or as the shapes tell.
    """
    if not {"dim", "num_heads", "ffn_dim"} <= set(config):
        return None
    return {
        **_dit_config(shapes),
        "num_attention_heads": config["num_heads"],
        "attention_head_dim": config["dim"] // config["num_heads"],
        "in_channels": config["in_dim"],
        "out_channels": config["out_dim"],
        "freq_dim": config["freq_dim"],
        "ffn_dim": config["ffn_dim"],
        "num_layers": config["num_layers"],
    }


def _dit_config(shapes: Shapes) -> dict[str, Any]:
    """Return the published transformer's configuration, with the widths of its
    conditions.
    """
    config: dict[str, Any] = json.loads((CONFIGS / "dit_t2v_14b.json").read_bytes())
    text = shapes.get(f"{EMBEDDER}.text_embedder.linear_1.weight")
    image = shapes.get(f"{EMBEDDER}.image_embedder.norm1.weight")
    ends = shapes.get(f"{EMBEDDER}.image_embedder.pos_embed")
    added = shapes.get("blocks.0.attn2.add_k_proj.weight")
    return config | {
        "text_dim": text[1] if text else config["text_dim"],
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": added[1] if added else None,
        "pos_embed_seq_len": ends[1] if ends else None,
    }


KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json", {"original": original_config})


def _dit(name: str, folder: str, original: str, *filenames: str) -> Component:
    """Return one of the two experts, or the only transformer: they differ in their
    folders and, in those of ComfyUI, in the files' names alone.
    """
    return Component(
        name,
        network=DiffusersNetwork("WanTransformer3DModel"),
        folder=folder,
        other_folders=(original,),
        default_configs=of_published(DIT_CONFIGS),
        infer=infer_dit,
        original_filenames=filenames,
        expert_filenames=(f"*{original.partition('_')[0]}*noise*",),
        unquantized=("condition_embedder.*", "proj_out"),
        **KEY_MAPS["dit"],
    )


COMPONENTS = (
    _dit("dit", "transformer", "high_noise_model", "diffusion_pytorch_model*"),
    _dit("dit2", "transformer_2", "low_noise_model"),
    Component(
        "text_encoder",
        network=TransformersNetwork("UMT5EncoderModel", "UMT5Config"),
        folder="text_encoder",
        default_configs=of_published(dict.fromkeys(DIT_CONFIGS, "text_encoder.json")),
        original_filenames=("models_t5_umt5*",),
        **KEY_MAPS["text_encoder"],
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKLWan"),
        folder="vae",
        default_configs=of_published(VAE_CONFIGS),
        original_filenames=("Wan2.*_VAE.*",),
        **KEY_MAPS["vae"],
    ),
    Component(
        "image_encoder",
        network=TransformersNetwork("CLIPVisionModel", "CLIPVisionConfig"),
        folder="image_encoder",
        default_configs=of_published(
            dict.fromkeys(IMAGE_TO_VIDEO, "image_encoder.json")
        ),
        original_filenames=("models_clip_*",),
        **KEY_MAPS["image_encoder"],
    ),
    Component(
        "tokenizer",
        network=Tokenizer("T5TokenizerFast"),
        folder="tokenizer",
        other_folders=("google/umt5-xxl",),
    ),
)
