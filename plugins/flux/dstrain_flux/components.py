"""FLUX's components: how their files are recognised, configured and loaded."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Shapes,
    Tokenizer,
    TransformersNetwork,
)

from dstrain_flux import formats

DIT = DiffusersNetwork("FluxTransformer2DModel")
VAE = DiffusersNetwork("AutoencoderKL")
IDS = tuple(
    f"black-forest-labs/FLUX.1-{name}"
    for name in ("dev", "Krea-dev", "Kontext-dev", "schnell")
)

# config.json of black-forest-labs/FLUX.1-dev's folders, for weights that come without
# it.
PUBLISHED_DIT = MappingProxyType(
    {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    }
)
PUBLISHED_CLIP = MappingProxyType(
    {
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 1,
        "projection_dim": 768,
        "vocab_size": 49408,
    }
)
PUBLISHED_T5 = MappingProxyType(
    {
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-06,
        "num_decoder_layers": 24,
        "num_heads": 64,
        "num_layers": 24,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
        "vocab_size": 32128,
    }
)
PUBLISHED_VAE = MappingProxyType(
    {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "force_upcast": True,
        "in_channels": 3,
        "latent_channels": 16,
        "layers_per_block": 2,
        "mid_block_add_attention": True,
        "norm_num_groups": 32,
        "out_channels": 3,
        "sample_size": 1024,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
    }
)


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """The configuration of a transformer with heads of 128 channels, of any depth and
    width, from its shapes.
    """
    head = PUBLISHED_DIT["attention_head_dim"]
    if shapes["transformer_blocks.0.attn.norm_q.weight"] != (head,):
        return None
    width, channels = shapes["x_embedder.weight"]
    made = shapes["proj_out.weight"][0]
    found = dict(PUBLISHED_DIT) | {
        "in_channels": channels,
        "num_layers": _count(shapes, "transformer_blocks."),
        "num_single_layers": _count(shapes, "single_transformer_blocks."),
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes[
            "time_text_embed.text_embedder.linear_1.weight"
        ][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight"
        in shapes,
    }
    return found if made == channels else found | {"out_channels": made}


def _count(shapes: Shapes, prefix: str) -> int:
    return 1 + max(
        int(name.removeprefix(prefix).split(".")[0])
        for name in shapes
        if name.startswith(prefix)
    )


def published_if(
    published: Mapping[str, Any], name: str, shape: tuple[int, ...], shapes: Shapes
) -> Mapping[str, Any] | None:
    """The published configuration, if the weight of this name has the published shape."""
    return published if shapes.get(name) == shape else None


CLIP = TransformersNetwork("CLIPTextModel", "CLIPTextConfig")
T5 = TransformersNetwork("T5EncoderModel", "T5Config")

COMPONENTS: tuple[Component, ...] = (
    Component(
        name="dit",
        folders=("transformer",),
        load=DIT.load,
        key_patterns=(
            "context_embedder.weight",
            "single_transformer_blocks.*.proj_mlp.weight",
        ),
        configure=DIT.configure,
        published=MappingProxyType(
            {
                name: {**PUBLISHED_DIT, "guidance_embeds": not name.endswith("schnell")}
                for name in IDS
            }
        ),
        infer=infer_dit,
        original_filenames=("flux1-*",),
        formats=formats.DIT_LAYOUTS,
        prefixes=formats.DIT_PREFIXES,
        lora=formats.DIT_LORA,
    ),
    Component(
        name="text_encoder_1",
        folders=("text_encoder",),
        load=CLIP.load,
        key_patterns=(
            "embeddings.token_embedding.weight",
            "encoder.layers.*.mlp.fc1.weight",
        ),
        configure=CLIP.configure,
        published=MappingProxyType(dict.fromkeys(IDS, PUBLISHED_CLIP)),
        infer=partial(
            published_if,
            PUBLISHED_CLIP,
            "embeddings.token_embedding.weight",
            (49408, 768),
        ),
        formats=formats.TEXT_ENCODER_1_LAYOUTS,
        prefixes=formats.TEXT_ENCODER_1_PREFIXES,
        lora=formats.TEXT_ENCODER_1_LORA,
    ),
    Component(
        name="text_encoder_2",
        folders=("text_encoder_2",),
        load=T5.load,
        key_patterns=(
            "encoder.block.*.layer.1.DenseReluDense.wi_0.weight",
            "encoder.block.*.layer.0.SelfAttention.q.weight",
        ),
        configure=T5.configure,
        published=MappingProxyType(dict.fromkeys(IDS, PUBLISHED_T5)),
        infer=partial(
            published_if,
            PUBLISHED_T5,
            "encoder.block.23.layer.1.DenseReluDense.wi_0.weight",
            (10240, 4096),
        ),
        formats=formats.TEXT_ENCODER_2_LAYOUTS,
        prefixes=formats.TEXT_ENCODER_2_PREFIXES,
        lora=formats.TEXT_ENCODER_2_LORA,
    ),
    Component(
        name="vae",
        folders=("vae",),
        load=VAE.load,
        key_patterns=(
            "encoder.down_blocks.*.resnets.*.conv1.weight",
            "decoder.mid_block.attentions.0.to_q.weight",
        ),
        configure=VAE.configure,
        published=MappingProxyType(dict.fromkeys(IDS, PUBLISHED_VAE)),
        original_filenames=("ae.*",),
        infer=partial(
            published_if, PUBLISHED_VAE, "decoder.conv_in.weight", (512, 16, 3, 3)
        ),
        formats=formats.VAE_LAYOUTS,
        prefixes=formats.VAE_PREFIXES,
    ),
    Component(
        name="tokenizer_1", folders=("tokenizer",), load=Tokenizer("CLIPTokenizer").load
    ),
    Component(
        name="tokenizer_2", folders=("tokenizer_2",), load=Tokenizer("T5Tokenizer").load
    ),
)
