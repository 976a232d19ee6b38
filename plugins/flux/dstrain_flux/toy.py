"""A FLUX of toy sizes with random weights, written as the published model is laid out."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import write_model
from tokenizers import pre_tokenizers

from dstrain_flux.components import COMPONENTS
from dstrain_flux.units import CLIP_TOKENS, T5_TOKENS

DIT = {
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
VAE = {
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
# Dropout in both, so that an encoder left in training mode is noticed; initial ranges
# that make prompts differ clearly.
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "projection_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CLIP_TOKENS,
    "attention_dropout": 0.1,
    "initializer_factor": 4.0,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.1,
}
# scheduler_config.json as published.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
PIPELINES = {"dev": "FluxPipeline", "kontext": "FluxKontextPipeline"}
MODEL_INDEX = {
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

    sizes: component -> entries of its config.json that replace the toy's own.
    """
    folder = Path(folder)
    index = {"_class_name": PIPELINES[variant], **MODEL_INDEX}
    _write_json(folder / "model_index.json", index)
    _write_json(folder / "scheduler/scheduler_config.json", SCHEDULER)
    clip, t5 = make_clip_tokenizer(), make_t5_tokenizer()
    clip.save_pretrained(folder / "tokenizer")
    t5.save_pretrained(folder / "tokenizer_2")
    networks = {
        "dit": DIT,
        "vae": VAE,
        "text_encoder_1": {
            **CLIP,
            "bos_token_id": clip.bos_token_id,
            "eos_token_id": clip.eos_token_id,
            "pad_token_id": 1,
            "vocab_size": len(clip),
        },
        "text_encoder_2": {**T5, "vocab_size": len(t5)},
    }
    # Two shards, as the published transformer and T5 have several.
    sharded = ("dit", "text_encoder_2")
    write_model(folder, COMPONENTS, networks, sizes, seed, sharded)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


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
