"""Wan's components: how their files are recognised, configured and loaded."""

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
)

from dstrain_wan import formats

CONFIGS = Path(__file__).parent / "configs"
HEAD = 128
"""Channels of an attention head, in every published transformer."""
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


def read_config(name: str) -> dict[str, Any]:
    """Return a published config.json."""
    content: dict[str, Any] = json.loads((CONFIGS / name).read_bytes())
    return content


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of a transformer with heads of 128 channels, as all
    published ones have.
    """
    width, channels, *patch = shapes["patch_embedding.weight"]
    if width % HEAD:
        return None
    embedder = "condition_embedder"
    image = shapes.get(f"{embedder}.image_embedder.norm1.weight")
    added = shapes.get("blocks.0.attn2.add_k_proj.weight")
    ends = shapes.get(f"{embedder}.image_embedder.pos_embed")
    blocks = [name for name in shapes if name.startswith("blocks.")]
    patch_size = patch[0] * patch[1] * patch[2]
    return {
        **read_config("dit_t2v_14b.json"),
        "patch_size": patch,
        "num_attention_heads": width // HEAD,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // patch_size,
        "text_dim": shapes[f"{embedder}.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes[f"{embedder}.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": 1 + max(int(name.split(".")[1]) for name in blocks),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": added[1] if added else None,
        "pos_embed_seq_len": ends[1] if ends else None,
    }


def infer_vae(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of the VAE of 2.1 or 2.2, told by its latent channels and
    width; None for another.
    """
    channels = shapes["post_quant_conv.weight"][0]
    width = shapes["encoder.conv_in.weight"][0]
    for name in ("vae_2_1.json", "vae_2_2.json"):
        config = read_config(name)
        if (config["z_dim"], config["base_dim"]) == (channels, width):
            return config
    return None


def infer_text_encoder(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of umT5-XXL, told by the size of its vocabulary and its
    width; None for another.
    """
    config = read_config("text_encoder.json")
    words = (config["vocab_size"], config["d_model"])
    return config if shapes.get("shared.weight") == words else None


def infer_image_encoder(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of CLIP-H's vision tower, told by its width and its
    patches; None for another.
    """
    width, _, *patch = shapes["embeddings.patch_embedding.weight"]
    config = read_config("image_encoder.json")
    published = (config["hidden_size"], config["patch_size"])
    return config if (width, patch[0]) == published else None


def _dit(name: str, folder: str, original: str, *filenames: str) -> Component:
    """Return one of the two experts, or the only transformer: they differ in their
    folders alone.
    """
    return Component(
        name,
        network=DiffusersNetwork("WanTransformer3DModel"),
        folder=folder,
        other_folders=(original,),
        key_patterns=(
            "patch_embedding.weight",
            "condition_embedder.time_proj.weight",
            "blocks.*.attn2.to_q.weight",
        ),
        default_configs=of_published(DIT_CONFIGS),
        infer=infer_dit,
        original_filenames=filenames,
        formats=formats.DIT_LAYOUTS,
        prefixes=formats.DIT_PREFIXES,
        lora=formats.dit_lora(name),
    )


COMPONENTS = (
    _dit("dit", "transformer", "high_noise_model", "diffusion_pytorch_model*"),
    _dit("dit2", "transformer_2", "low_noise_model"),
    Component(
        "text_encoder",
        network=TransformersNetwork("UMT5EncoderModel", "UMT5Config"),
        folder="text_encoder",
        key_patterns=(
            "encoder.block.*.SelfAttention.relative_attention_bias.weight",
            "encoder.final_layer_norm.weight",
        ),
        default_configs=of_published(dict.fromkeys(DIT_CONFIGS, "text_encoder.json")),
        infer=infer_text_encoder,
        original_filenames=("models_t5_umt5*",),
        formats=formats.TEXT_ENCODER_LAYOUTS,
        prefixes=formats.TEXT_ENCODER_PREFIXES,
        lora=formats.TEXT_ENCODER_LORA,
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKLWan"),
        folder="vae",
        key_patterns=(
            "post_quant_conv.weight",
            "encoder.*.gamma",
            "decoder.up_blocks.*",
        ),
        default_configs=of_published(VAE_CONFIGS),
        infer=infer_vae,
        original_filenames=("Wan2.*_VAE.*",),
        formats=formats.VAE_LAYOUTS,
        prefixes=formats.VAE_PREFIXES,
    ),
    Component(
        "image_encoder",
        network=TransformersNetwork("CLIPVisionModel", "CLIPVisionConfig"),
        folder="image_encoder",
        key_patterns=("embeddings.class_embedding", "post_layernorm.weight"),
        default_configs=of_published(
            dict.fromkeys(IMAGE_TO_VIDEO, "image_encoder.json")
        ),
        infer=infer_image_encoder,
        original_filenames=("models_clip_*",),
        formats=formats.IMAGE_ENCODER_LAYOUTS,
        prefixes=formats.IMAGE_ENCODER_PREFIXES,
    ),
    Component(
        "tokenizer",
        network=Tokenizer("T5TokenizerFast"),
        folder="tokenizer",
        other_folders=("google/umt5-xxl",),
    ),
)
