"""A Wan of toy sizes with random weights, written as the published model is laid out."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

DIT = MappingProxyType(
    {
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
)
# What a variant's transformer has of its own.
DITS = MappingProxyType(
    {
        "i2v": {"in_channels": 36, "image_dim": 16, "added_kv_proj_dim": 24},
        "i2v-a14b": {"in_channels": 36},
        "ti2v-5b": {"in_channels": 48, "out_channels": 48},
    }
)
VAE = MappingProxyType(
    {
        "base_dim": 8,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    }
)
VAE_5B = MappingProxyType(
    {
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
)
# Dropout, so that an encoder left in training mode is noticed.
TEXT = MappingProxyType(
    {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.1,
    }
)
IMAGE = MappingProxyType(
    {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "hidden_act": "gelu",
    }
)
SCHEDULER = MappingProxyType(
    {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 5.0,
    }
)
IMAGE_PROCESSOR = MappingProxyType(
    {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": IMAGE["image_size"], "width": IMAGE["image_size"]},
        "size": {"shortest_edge": IMAGE["image_size"]},
    }
)
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

    sizes: component -> arguments of its class's constructor that replace the toy's own.
    """
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    sizes, folder = sizes or {}, Path(folder)
    _write_json(folder / "model_index.json", _model_index(variant))
    _write_json(folder / "scheduler/scheduler_config.json", SCHEDULER)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    with torch.random.fork_rng(devices=[]):
        for offset, (name, place) in enumerate(_experts(variant)):
            torch.manual_seed(seed + 1000 * offset)
            dit = WanTransformer3DModel(
                **{**DIT, **DITS.get(variant, {}), **sizes.get(name, {})}
            )
            # Two shards, as the published transformer has several.
            dit.save_pretrained(
                folder / place,
                max_shard_size=int(
                    0.6 * dit.get_memory_footprint(return_buffers=False)
                ),
            )
        torch.manual_seed(seed)
        vae = {
            **VAE,
            **(VAE_5B if variant == "ti2v-5b" else {}),
            **sizes.get("vae", {}),
        }
        AutoencoderKLWan(**vae).save_pretrained(folder / "vae")
        torch.manual_seed(seed)
        _write_text_encoder(
            folder / "text_encoder", len(tokenizer), sizes.get("text_encoder", {})
        )
        if variant == "i2v":
            torch.manual_seed(seed)
            _write_image_encoder(folder, sizes.get("image_encoder", {}))


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


def _write_text_encoder(folder: Path, words: int, sizes: Mapping[str, Any]) -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    module = UMT5EncoderModel(UMT5Config(**{**TEXT, "vocab_size": words, **sizes}))
    module.config.architectures = ["UMT5EncoderModel"]
    module.config.save_pretrained(folder)
    weights = {
        name: weight
        for name, weight in module.state_dict().items()
        if name not in module.all_tied_weights_keys
    }
    # The module's own save_pretrained writes in one process of several only.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_image_encoder(folder: Path, sizes: Mapping[str, Any]) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    module = CLIPVisionModel(CLIPVisionConfig(**{**IMAGE, **sizes}))
    module.config.save_pretrained(folder / "image_encoder")
    weights = {
        f"vision_model.{name}": weight.contiguous()
        for name, weight in module.state_dict().items()
    }
    save_file(
        weights, folder / "image_encoder/model.safetensors", metadata={"format": "pt"}
    )
    _write_json(folder / "image_processor/preprocessor_config.json", IMAGE_PROCESSOR)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")


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
