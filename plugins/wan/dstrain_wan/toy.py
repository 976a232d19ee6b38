"""A Wan of toy sizes with random weights, written as the published model is laid out."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import write_model

from dstrain_wan.components import COMPONENTS

DIT = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 256,
    "ffn_dim": 64,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}
# What a variant's transformer has of its own.
DITS = {
    "i2v": {"in_channels": 36, "image_dim": 16, "added_kv_proj_dim": 24},
    "i2v-a14b": {"in_channels": 36},
    "ti2v-5b": {"in_channels": 48, "out_channels": 48},
}
VAE = {
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}
VAE_5B = {
    "decoder_base_dim": 8,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
# Dropout, so that an encoder left in training mode is noticed.
TEXT = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.1,
}
IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "hidden_act": "gelu",
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 5.0,
}
IMAGE_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": IMAGE["image_size"], "width": IMAGE["image_size"]},
    "size": {"shortest_edge": IMAGE["image_size"]},
}
WORDS = (
    "a",
    "an",
    "the",
    "of",
    "in",
    "on",
    "and",
    "dog",
    "cat",
    "runs",
    "red",
    "video",
)


def write(
    folder: Path,
    variant: str = "t2v",
    seed: int = 0,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a toy of `variant` to `folder`; equal arguments write equal files.

    sizes: component -> entries of its config.json that replace the toy's own.
    """
    folder = Path(folder)
    _write_json(folder / "model_index.json", _model_index(variant))
    _write_json(folder / "scheduler/scheduler_config.json", SCHEDULER)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    networks: dict[str, Mapping[str, Any]] = {
        name: {**DIT, **DITS.get(variant, {})} for name, _ in _experts(variant)
    }
    networks["vae"] = {**VAE, **(VAE_5B if variant == "ti2v-5b" else {})}
    networks["text_encoder"] = {**TEXT, "vocab_size": len(tokenizer)}
    if variant == "i2v":
        networks["image_encoder"] = IMAGE
        processor = folder / "image_processor/preprocessor_config.json"
        _write_json(processor, IMAGE_PROCESSOR)
    # Two shards, as the published transformers have several.
    sharded = ("dit", "dit2")
    write_model(folder, COMPONENTS, networks, sizes, seed, sharded)


def make_tokenizer() -> Any:
    """A unigram tokenizer of the umT5 kind that knows ASCII's letters, digits and
    marks, and a few words.
    """
    from transformers import T5TokenizerFast

    marks = string.ascii_letters + string.digits + string.punctuation
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(mark, -4.0) for mark in marks] + [(f"▁{word}", -3.0) for word in WORDS]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def _experts(variant: str) -> tuple[tuple[str, str], ...]:
    """Component and folder of each transformer."""
    both = (("dit", "transformer"), ("dit2", "transformer_2"))
    return both if variant.endswith("a14b") else both[:1]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _model_index(variant: str) -> Mapping[str, Any]:
    """model_index.json as published: diffusers' class, and the library and class of
    each folder.
    """
    experts = {
        folder: ["diffusers", "WanTransformer3DModel"]
        for _, folder in _experts(variant)
    }
    image = {
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
    }
    boundary = (
        {"boundary_ratio": {"t2v-a14b": 0.875, "i2v-a14b": 0.9}[variant]}
        if len(experts) > 1
        else {}
    )
    return {
        "_class_name": "WanImageToVideoPipeline"
        if variant.startswith("i2v")
        else "WanPipeline",
        **boundary,
        **({"expand_timesteps": True} if variant == "ti2v-5b" else {}),
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        **experts,
        **(image if variant == "i2v" else {}),
    }
