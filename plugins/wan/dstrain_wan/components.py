"""Wan's components: how their files are recognised, configured and loaded."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dstrain.plugin import Component, DiffusersNetwork, Tokenizer, TransformersNetwork

from dstrain_wan import formats

DIT = DiffusersNetwork("WanTransformer3DModel")
VAE = DiffusersNetwork("AutoencoderKLWan")
UMT5 = TransformersNetwork("UMT5EncoderModel", "UMT5Config")
CLIP = TransformersNetwork("CLIPVisionModel", "CLIPVisionConfig")
HEAD = 128
"""Channels of an attention head, in every published transformer."""

# config.json of the published folders, for weights that come without it.
DIT_14B = MappingProxyType(
    {
        "patch_size": [1, 2, 2],
        "num_attention_heads": 40,
        "attention_head_dim": HEAD,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
    }
)
DIT_1_3B = MappingProxyType(
    {**DIT_14B, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
)
DIT_I2V = MappingProxyType(
    {**DIT_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
)
DIT_I2V_A14B = MappingProxyType({**DIT_14B, "in_channels": 36})
DIT_5B = MappingProxyType(
    {
        **DIT_14B,
        "num_attention_heads": 24,
        "ffn_dim": 14336,
        "num_layers": 30,
        "in_channels": 48,
        "out_channels": 48,
    }
)
VAE_2_1 = MappingProxyType(
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
VAE_2_2 = MappingProxyType(
    {
        **VAE_2_1,
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 4,
        "latents_mean": [
            *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
            *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
            *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
            *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
            *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
            *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
        ],
        "latents_std": [
            *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
            *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
            *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
            *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
            *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
            *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
        ],
    }
)
TEXT_ENCODER = MappingProxyType(
    {
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "vocab_size": 256384,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
)
IMAGE_ENCODER = MappingProxyType(
    {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": 1024,
    }
)

# The published models, in their original layout and in that of diffusers.
DITS = MappingProxyType(
    {
        f"Wan-AI/{name}{checkpoint_format}": configuration
        for name, configuration in (
            ("Wan2.1-T2V-1.3B", DIT_1_3B),
            ("Wan2.1-T2V-14B", DIT_14B),
            ("Wan2.1-I2V-14B-480P", DIT_I2V),
            ("Wan2.1-I2V-14B-720P", DIT_I2V),
            ("Wan2.2-T2V-A14B", DIT_14B),
            ("Wan2.2-I2V-A14B", DIT_I2V_A14B),
            ("Wan2.2-TI2V-5B", DIT_5B),
        )
        for checkpoint_format in ("", "-Diffusers")
    }
)
VAES = MappingProxyType(
    {
        name: VAE_2_2 if configuration is DIT_5B else VAE_2_1
        for name, configuration in DITS.items()
    }
)


def infer_dit(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any] | None:
    """The configuration of a transformer with heads of 128 channels, as all published
    ones, from its shapes.
    """
    width, channels, *patch = shapes["patch_embedding.weight"]
    if width % HEAD:
        return None
    image = shapes.get("condition_embedder.image_embedder.norm1.weight")
    added = shapes.get("blocks.0.attn2.add_k_proj.weight")
    ends = shapes.get("condition_embedder.image_embedder.pos_embed")
    return {
        **DIT_14B,
        "patch_size": patch,
        "num_attention_heads": width // HEAD,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0]
        // (patch[0] * patch[1] * patch[2]),
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": 1
        + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": added[1] if added else None,
        "pos_embed_seq_len": ends[1] if ends else None,
    }


def infer_vae(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any] | None:
    """The configuration of the VAE of 2.1 or 2.2, told by its latent channels and
    width; None for another.
    """
    latents, width = (
        shapes["post_quant_conv.weight"][0],
        shapes["encoder.conv_in.weight"][0],
    )
    known = {(vae["z_dim"], vae["base_dim"]): vae for vae in (VAE_2_1, VAE_2_2)}
    return known.get((latents, width))


def infer_text_encoder(
    shapes: Mapping[str, tuple[int, ...]],
) -> Mapping[str, Any] | None:
    """The configuration of umT5-XXL, told by the size of its vocabulary and its width;
    None for another.
    """
    words = (TEXT_ENCODER["vocab_size"], TEXT_ENCODER["d_model"])
    return TEXT_ENCODER if shapes.get("shared.weight") == words else None


def infer_image_encoder(
    shapes: Mapping[str, tuple[int, ...]],
) -> Mapping[str, Any] | None:
    """The configuration of CLIP-H's vision tower, told by its width and its patches;
    None for another.
    """
    width, _, *patch = shapes["embeddings.patch_embedding.weight"]
    published = (IMAGE_ENCODER["hidden_size"], IMAGE_ENCODER["patch_size"])
    return IMAGE_ENCODER if (width, patch[0]) == published else None


def _dit(name: str, *folders: str) -> Component:
    """One of the two experts, or the only transformer: they differ in nothing but their
    folder.
    """
    return Component(
        name=name,
        folders=folders,
        load=DIT.load,
        key_patterns=(
            "patch_embedding.weight",
            "condition_embedder.time_proj.weight",
            "blocks.*.attn2.to_q.weight",
        ),
        configure=DIT.configure,
        published=DITS,
        infer=infer_dit,
        original_filenames=("diffusion_pytorch_model*",) if name == "dit" else (),
        formats=formats.DIT_LAYOUTS,
        prefixes=formats.DIT_PREFIXES,
        lora=formats.dit_lora(name),
    )


COMPONENTS: tuple[Component, ...] = (
    _dit("dit", "transformer", "high_noise_model"),
    _dit("dit2", "transformer_2", "low_noise_model"),
    Component(
        name="text_encoder",
        folders=("text_encoder",),
        load=UMT5.load,
        key_patterns=(
            "encoder.block.*.SelfAttention.relative_attention_bias.weight",
            "encoder.final_layer_norm.weight",
        ),
        configure=UMT5.configure,
        published=MappingProxyType(dict.fromkeys(DITS, TEXT_ENCODER)),
        infer=infer_text_encoder,
        original_filenames=("models_t5_umt5*",),
        formats=formats.TEXT_ENCODER_LAYOUTS,
        prefixes=formats.TEXT_ENCODER_PREFIXES,
        lora=formats.TEXT_ENCODER_LORA,
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
        published=VAES,
        infer=infer_vae,
        original_filenames=("Wan2.*_VAE.*",),
        formats=formats.VAE_LAYOUTS,
        prefixes=formats.VAE_PREFIXES,
    ),
    Component(
        name="image_encoder",
        folders=("image_encoder",),
        load=CLIP.load,
        key_patterns=("embeddings.class_embedding", "post_layernorm.weight"),
        formats=formats.IMAGE_ENCODER_LAYOUTS,
        prefixes=formats.IMAGE_ENCODER_PREFIXES,
        configure=CLIP.configure,
        published=MappingProxyType(
            {name: IMAGE_ENCODER for name in DITS if "Wan2.1-I2V" in name}
        ),
        infer=infer_image_encoder,
        original_filenames=("models_clip_*",),
    ),
    Component(
        name="tokenizer",
        folders=("tokenizer", "google/umt5-xxl"),
        load=Tokenizer("T5TokenizerFast").load,
    ),
)
