"""A FLUX of toy sizes with random weights, written as the published model is laid out."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from dstrain_flux.units import CLIP_TOKENS, T5_TOKENS

DIT = MappingProxyType(
    {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    }
)
VAE = MappingProxyType(
    {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [8, 8, 16, 16],
        "layers_per_block": 1,
        "latent_channels": 16,
        "norm_num_groups": 4,
        "sample_size": 64,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
)
# Dropout in both, so that an encoder left in training mode is noticed; initial ranges
# that make prompts differ clearly.
CLIP = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 37,
        "projection_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": CLIP_TOKENS,
        "attention_dropout": 0.1,
        "initializer_factor": 4.0,
    }
)
T5 = MappingProxyType(
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
# scheduler_config.json as published.
SCHEDULER = MappingProxyType(
    {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
    }
)
PIPELINES = MappingProxyType({"dev": "FluxPipeline", "kontext": "FluxKontextPipeline"})
MODEL_INDEX = MappingProxyType(
    {
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
)
CLIP_SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>")
CLIP_MERGES = (
    ("a", "n"),
    ("d", "o"),
    ("o", "n</w>"),
    ("t", "h"),
    ("an", "d</w>"),
    ("do", "g</w>"),
    ("th", "e</w>"),
)
T5_WORDS = ("▁a", "▁the", "▁and", "▁on", "▁dog", "▁cat", "an", "er", "in", "th")


def write(
    folder: Path,
    variant: str = "dev",
    seed: int = 0,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a toy of `variant` to `folder`; equal arguments write equal files.

    sizes: component -> arguments of its class's constructor (of its configuration, for
    a text encoder) that replace the toy's own.
    """
    from diffusers import AutoencoderKL, FluxTransformer2DModel

    sizes = sizes or {}
    folder = Path(folder)
    index = {"_class_name": PIPELINES[variant], **MODEL_INDEX}
    for name, data in (
        ("model_index.json", index),
        ("scheduler/scheduler_config.json", dict(SCHEDULER)),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tokenizers = make_clip_tokenizer(), make_t5_tokenizer()
    for tokenizer, name in zip(tokenizers, ("tokenizer", "tokenizer_2"), strict=True):
        tokenizer.save_pretrained(folder / name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dit = FluxTransformer2DModel(**{**DIT, **sizes.get("dit", {})})
        # Two shards, as the published transformer has several.
        dit.save_pretrained(
            folder / "transformer", max_shard_size=int(0.6 * dit.get_memory_footprint())
        )
        torch.manual_seed(seed)
        AutoencoderKL(**{**VAE, **sizes.get("vae", {})}).save_pretrained(folder / "vae")
        torch.manual_seed(seed)
        _write_clip(
            folder / "text_encoder", tokenizers[0], sizes.get("text_encoder_1", {})
        )
        torch.manual_seed(seed)
        _write_t5(
            folder / "text_encoder_2", tokenizers[1], sizes.get("text_encoder_2", {})
        )


def make_clip_tokenizer() -> Any:
    """CLIP's tokenizer with few merges: every byte, alone and at a word's end, so that
    no text is unknown.
    """
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        *(a + b for a, b in CLIP_MERGES),
    ]
    vocabulary = {piece: i for i, piece in enumerate((*pieces, *CLIP_SPECIAL_TOKENS))}
    return CLIPTokenizer(
        vocab=vocabulary, merges=list(CLIP_MERGES), model_max_length=CLIP_TOKENS
    )


def make_t5_tokenizer() -> Any:
    """T5's tokenizer with printable ASCII and a few words; other characters are
    unknown, as most are to T5.
    """
    from transformers import T5Tokenizer

    return T5Tokenizer(
        vocab=list(_t5_pieces()), extra_ids=0, model_max_length=T5_TOKENS
    )


def _t5_pieces() -> Iterator[tuple[str, float]]:
    yield from (("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0))
    yield from ((word, -3.0) for word in T5_WORDS)
    yield from ((chr(code), -6.0) for code in range(ord("!"), ord("~") + 1))


def _write_clip(folder: Path, tokenizer: Any, sizes: Mapping[str, Any]) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 1,
    }
    module = CLIPTextModel(
        CLIPTextConfig(**{**CLIP, **ids, "vocab_size": len(tokenizer), **sizes})
    )
    module.config.save_pretrained(folder)
    weights = {
        f"text_model.{name}": weight.contiguous()
        for name, weight in module.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_t5(folder: Path, tokenizer: Any, sizes: Mapping[str, Any]) -> None:
    from transformers import T5Config, T5EncoderModel

    module = T5EncoderModel(T5Config(**{**T5, "vocab_size": len(tokenizer), **sizes}))
    module.config.architectures = ["T5EncoderModel"]
    module.config.save_pretrained(folder)
    weights = {
        name: weight
        for name, weight in module.state_dict().items()
        if name not in module.all_tied_weights_keys
    }
    # Two shards, as the published encoder has; the module's own save_pretrained writes
    # in one process of several only.
    save_torch_state_dict(
        weights, folder, max_shard_size=int(0.6 * module.get_memory_footprint())
    )
