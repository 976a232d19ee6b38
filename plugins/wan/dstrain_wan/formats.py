"""Arrangements in which Wan's weights are published beside that of diffusers: the
original files, and ComfyUI's.

Facts of the layouts: the modules of Wan-Video/Wan2.1 and Wan2.2, whose state dicts the
original files are, and the files that ComfyUI reads and writes.
"""

import re
from collections.abc import Mapping
from typing import Any

from dstrain.plugin import (
    CheckpointFormat,
    KeyMap,
    LoraKeyFormat,
    Shapes,
    nth_of,
    same_config,
)

DIT_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
VAE_PREFIXES = ("vae.", "first_stage_model.")
TEXT_ENCODER_PREFIXES = ("text_encoders.umt5xxl.",)
IMAGE_ENCODER_PREFIXES = ("clip_vision.",)


def _attention(own: str, file: str) -> tuple[KeyMap, ...]:
    parts = (
        ("to_q", "q"),
        ("to_k", "k"),
        ("to_v", "v"),
        ("to_out.0", "o"),
        ("norm_q", "norm_q"),
        ("norm_k", "norm_k"),
    )
    added = (
        ("add_k_proj", "k_img"),
        ("add_v_proj", "v_img"),
        ("norm_added_k", "norm_k_img"),
    )
    return tuple(
        KeyMap(f"blocks.*.{own}.{name}", f"blocks.*.{file}.{old}")
        for name, old in (*parts, *added)
    )


def dit_configuration(
    content: Mapping[str, Any], shapes: Shapes
) -> Mapping[str, Any] | None:
    """config.json of the original repositories -> that of diffusers; None for content
    of another kind.

    What the original leaves to its code (patches, norms, the widths of text and picture
    features) is as all published models have it, or as the shapes tell.
    """
    if not {"dim", "num_heads", "ffn_dim"} <= set(content):
        return None
    text = shapes.get(
        "condition_embedder.text_embedder.linear_1.weight", (content["dim"], 4096)
    )
    image = shapes.get("condition_embedder.image_embedder.norm1.weight")
    ends = shapes.get("condition_embedder.image_embedder.pos_embed")
    return {
        "patch_size": [1, 2, 2],
        "num_attention_heads": content["num_heads"],
        "attention_head_dim": content["dim"] // content["num_heads"],
        "in_channels": content["in_dim"],
        "out_channels": content["out_dim"],
        "text_dim": text[1],
        "freq_dim": content["freq_dim"],
        "ffn_dim": content["ffn_dim"],
        "num_layers": content["num_layers"],
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": content.get("eps", 1e-6),
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": content["dim"] if image else None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": ends[1] if ends else None,
    }


ORIGINAL_DIT = CheckpointFormat(
    key_patterns=(
        "patch_embedding.weight",
        "blocks.*.self_attn.q.weight",
        "head.modulation",
    ),
    rows=(
        KeyMap("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        KeyMap("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        KeyMap("condition_embedder.time_proj", "time_projection.1"),
        KeyMap("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        KeyMap("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        KeyMap("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
        KeyMap("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
        KeyMap("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
        KeyMap("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
        KeyMap("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
        KeyMap("blocks.*.scale_shift_table", "blocks.*.modulation"),
        *_attention("attn1", "self_attn"),
        *_attention("attn2", "cross_attn"),
        KeyMap(
            "blocks.*.norm2", "blocks.*.norm3"
        ),  # of cross attention; the others have no weights
        KeyMap("blocks.*.ffn.net.0.proj", "blocks.*.ffn.0"),
        KeyMap("blocks.*.ffn.net.2", "blocks.*.ffn.2"),
        KeyMap("scale_shift_table", "head.modulation"),
        KeyMap("proj_out", "head.head"),
    ),
    configuration=dit_configuration,
)


def _residual(own: str, file: str) -> tuple[KeyMap, ...]:
    parts = (("norm1", 0), ("conv1", 2), ("norm2", 3), ("conv2", 6))
    rows = tuple(
        KeyMap(f"{own}.{name}", f"{file}.residual.{place}") for name, place in parts
    )
    return (*rows, KeyMap(f"{own}.conv_shortcut", f"{file}.shortcut"))


def vae_rows(shapes: Shapes) -> tuple[KeyMap, ...]:
    """Return the table of an autoencoder of 2.1, whose levels are one flat list in the
    file, or of 2.2, where they nest.
    """
    rows = [KeyMap("quant_conv", "conv1"), KeyMap("post_quant_conv", "conv2")]
    for half in ("encoder", "decoder"):
        middle = f"{half}.mid_block"
        rows += [
            KeyMap(f"{half}.conv_in", f"{half}.conv1"),
            KeyMap(f"{half}.norm_out", f"{half}.head.0"),
        ]
        rows += [
            KeyMap(f"{half}.conv_out", f"{half}.head.2"),
            KeyMap(f"{middle}.attentions.0", f"{half}.middle.1"),
        ]
        rows += _residual(f"{middle}.resnets.0", f"{half}.middle.0") + _residual(
            f"{middle}.resnets.1", f"{half}.middle.2"
        )
    nested = any(
        re.match(r"decoder\.upsamples\.\d+\.upsamples\.", name) for name in shapes
    )
    return (*rows, *(_nested(shapes) if nested else _flat(shapes)))


def _flat(shapes: Shapes) -> list[KeyMap]:
    rows = [*_residual("encoder.down_blocks.*", "encoder.downsamples.*")]
    rows.append(KeyMap("encoder.down_blocks.*", "encoder.downsamples.*"))
    samplers = _numbers(r"decoder\.upsamples\.(\d+)\.resample\.", shapes)
    blocks = _numbers(r"decoder\.upsamples\.(\d+)\.", shapes)
    for (block,) in blocks:
        level = sum(sampler < block for (sampler,) in samplers)
        first = max(
            (sampler + 1 for (sampler,) in samplers if sampler < block), default=0
        )
        if (block,) in samplers:
            rows.append(
                KeyMap(
                    f"decoder.up_blocks.{level}.upsamplers.0",
                    f"decoder.upsamples.{block}",
                )
            )
        else:
            rows += _residual(
                f"decoder.up_blocks.{level}.resnets.{block - first}",
                f"decoder.upsamples.{block}",
            )
    return rows


def _nested(shapes: Shapes) -> list[KeyMap]:
    rows: list[KeyMap] = []
    for half, way in (("encoder", "down"), ("decoder", "up")):
        rows += _residual(
            f"{half}.{way}_blocks.*.resnets.*", f"{half}.{way}samples.*.{way}samples.*"
        )
        for level, place in _numbers(
            rf"{half}\.{way}samples\.(\d+)\.{way}samples\.(\d+)\.resample\.", shapes
        ):
            own = f"{half}.{way}_blocks.{level}.{way}sampler"
            rows.append(
                KeyMap(own, f"{half}.{way}samples.{level}.{way}samples.{place}")
            )
    return rows


def _numbers(pattern: str, names: Shapes) -> list[tuple[int, ...]]:
    return sorted(
        {
            tuple(map(int, found.groups()))
            for name in names
            if (found := re.match(pattern, name))
        }
    )


ORIGINAL_VAE = CheckpointFormat(
    key_patterns=(
        "encoder.downsamples.*.residual.2.weight",
        "decoder.upsamples.*.residual.2.weight",
        "conv2.weight",
    ),
    rows=vae_rows,
)

_BLOCK = "encoder.block.*.layer"
ORIGINAL_TEXT_ENCODER = CheckpointFormat(
    key_patterns=(
        "token_embedding.weight",
        "blocks.*.attn.q.weight",
        "blocks.*.ffn.gate.0.weight",
    ),
    rows=(
        KeyMap("shared", "token_embedding"),
        *(
            KeyMap(f"{_BLOCK}.0.SelfAttention.{part}", f"blocks.*.attn.{part}")
            for part in "qkvo"
        ),
        KeyMap(
            f"{_BLOCK}.0.SelfAttention.relative_attention_bias",
            "blocks.*.pos_embedding.embedding",
        ),
        KeyMap(f"{_BLOCK}.0.layer_norm", "blocks.*.norm1"),
        KeyMap(f"{_BLOCK}.1.layer_norm", "blocks.*.norm2"),
        KeyMap(f"{_BLOCK}.1.DenseReluDense.wi_0", "blocks.*.ffn.gate.0"),
        KeyMap(f"{_BLOCK}.1.DenseReluDense.wi_1", "blocks.*.ffn.fc1"),
        KeyMap(f"{_BLOCK}.1.DenseReluDense.wo", "blocks.*.ffn.fc2"),
        KeyMap("encoder.final_layer_norm", "norm"),
    ),
)
_T5_MARK = "encoder.block.*.layer.1.DenseReluDense.wi_0.weight"
# ComfyUI's files hold the tokenizer too.
COMFYUI_TEXT_ENCODER = CheckpointFormat(
    key_patterns=(_T5_MARK, "spiece_model"), ignored=("spiece_model",)
)
COMFYUI_TEXT_ENCODER_IN_ALL = CheckpointFormat(
    key_patterns=(f"transformer.{_T5_MARK}",),
    rows=(KeyMap("", "transformer"),),
    ignored=("spiece_model", "logit_scale"),
)

_LAYER = "encoder.layers.*"
_VISUAL = "visual.transformer.*"
ORIGINAL_IMAGE_ENCODER = CheckpointFormat(
    key_patterns=("visual.cls_embedding", "visual.transformer.*.attn.to_qkv.weight"),
    rows=(
        KeyMap("embeddings.class_embedding", "visual.cls_embedding"),
        KeyMap("embeddings.position_embedding.weight", "visual.pos_embedding"),
        KeyMap("embeddings.patch_embedding", "visual.patch_embedding"),
        KeyMap("pre_layrnorm", "visual.pre_norm"),
        *(
            KeyMap(
                f"{_LAYER}.self_attn.{part}_proj",
                f"{_VISUAL}.attn.to_qkv",
                nth_of(i, 3),
            )
            for i, part in enumerate("qkv")
        ),
        KeyMap(f"{_LAYER}.self_attn.out_proj", f"{_VISUAL}.attn.proj"),
        KeyMap(f"{_LAYER}.layer_norm1", f"{_VISUAL}.norm1"),
        KeyMap(f"{_LAYER}.layer_norm2", f"{_VISUAL}.norm2"),
        KeyMap(f"{_LAYER}.mlp.fc1", f"{_VISUAL}.mlp.0"),
        KeyMap(f"{_LAYER}.mlp.fc2", f"{_VISUAL}.mlp.2"),
        KeyMap("post_layernorm", "visual.post_norm"),
    ),
    # The half that reads text, and the projections into the space that both halves
    # share.
    ignored=("textual.*", "log_scale", "visual.head"),
)
# The names of transformers before version 5, as published.
PUBLISHED_IMAGE_ENCODER = CheckpointFormat(
    key_patterns=(
        "vision_model.embeddings.class_embedding",
        "vision_model.post_layernorm.weight",
    ),
    rows=(KeyMap("", "vision_model"),),
    ignored=(
        "visual_projection.weight",
        "text_projection.weight",
        "text_model.*",
        "logit_scale",
        "*.position_ids",
    ),
    configuration=same_config,
)

DIT_LAYOUTS = (ORIGINAL_DIT,)
VAE_LAYOUTS = (ORIGINAL_VAE,)
TEXT_ENCODER_LAYOUTS = (
    ORIGINAL_TEXT_ENCODER,
    COMFYUI_TEXT_ENCODER,
    COMFYUI_TEXT_ENCODER_IN_ALL,
)
IMAGE_ENCODER_LAYOUTS = (ORIGINAL_IMAGE_ENCODER, PUBLISHED_IMAGE_ENCODER)

# Names in LoRA files. ComfyUI: comfy/lora.py, model_lora_keys_clip. kohya:
# networks/lora_wan.py of musubi-tuner; with two '_', those of VideoX-Fun
# (comfy/lora_convert.py, convert_lora_wan_fun). The reference has the original names.
TEXT_ENCODER_LORA = (
    LoraKeyFormat("comfyui", ("text_encoders.umt5xxl.transformer.",)),
    LoraKeyFormat("diffsynth", ("", "pipe.text_encoder."), ORIGINAL_TEXT_ENCODER),
)


def dit_lora(name: str) -> tuple[LoraKeyFormat, ...]:
    """How LoRA files name the layers of one of the two experts, or of the only
    transformer.
    """
    return (
        LoraKeyFormat(
            "kohya", ("lora_unet_", "lora_unet__"), ORIGINAL_DIT, underscored=True
        ),
        LoraKeyFormat("diffsynth", ("", f"pipe.{name}."), ORIGINAL_DIT),
    )
