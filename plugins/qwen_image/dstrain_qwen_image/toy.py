"""A Qwen-Image of toy sizes with random weights, written as the published model is laid
out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import write_model
from tokenizers import pre_tokenizers, trainers

from dstrain_qwen_image.components import COMPONENTS
from dstrain_qwen_image.units import (
    EDIT_PREFIX,
    EDIT_PREFIX_TOKENS,
    PREFIX,
    PREFIX_TOKENS,
    SUFFIX,
)

SPECIAL_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        *(
            "endoftext",
            "im_start",
            "im_end",
            "object_ref_start",
            "object_ref_end",
            "box_start",
            "box_end",
        ),
        *(
            "quad_start",
            "quad_end",
            "vision_start",
            "vision_end",
            "vision_pad",
            "image_pad",
            "video_pad",
        ),
    )
)

DIT = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "guidance_embeds": False,
    "axes_dims_rope": (4, 6, 6),
}
VAE = {
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
}
# Dropout, so that an encoder left in training mode is noticed; an initial range that
# makes prompts differ clearly.
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "attention_dropout": 0.1,
    "initializer_range": 0.06,
    "rope_scaling": {
        "mrope_section": [2, 3, 3],
        "rope_type": "default",
        "type": "default",
    },
    "rope_theta": 1000000.0,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.06,
}
# scheduler_config.json as published.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
# processor/preprocessor_config.json as published: patches of 14x14 pixels, merged 2x2,
# and at least 56x56 pixels.
PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": 14,
    "processor_class": "Qwen2VLProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "temporal_patch_size": 2,
}
MODEL_INDEX = {
    "_class_name": "QwenImagePipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}
PROCESSOR = ("transformers", "Qwen2VLProcessor")
EDITS = {
    "edit": {"_class_name": "QwenImageEditPipeline", "processor": PROCESSOR},
    "edit-2509": {
        "_class_name": "QwenImageEditPlusPipeline",
        "processor": PROCESSOR,
    },
    "edit-2511": {
        "_class_name": "QwenImageEditPlusPipeline",
        "processor": PROCESSOR,
    },
}
"""Variants that edit pictures -> what their model_index.json has of its own."""


def write(
    folder: Path,
    variant: str = "base",
    seed: int = 0,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a toy of `variant` to `folder`; equal arguments write equal files.

    sizes: component -> entries of its config.json that replace the toy's own.
    """
    folder = Path(folder)
    edits = variant in EDITS
    _write_json(folder / "model_index.json", {**MODEL_INDEX, **EDITS.get(variant, {})})
    _write_json(folder / "scheduler/scheduler_config.json", SCHEDULER)
    prefix = (EDIT_PREFIX, EDIT_PREFIX_TOKENS) if edits else (PREFIX, PREFIX_TOKENS)
    tokenizer = make_tokenizer(*prefix)
    tokenizer.save_pretrained(folder / "tokenizer")
    if edits:
        tokenizer.save_pretrained(folder / "processor")
        _write_json(folder / "processor/preprocessor_config.json", PREPROCESSOR)
    own = {"zero_cond_t": True} if variant == "edit-2511" else {}
    networks = {
        "dit": {**DIT, **own},
        "vae": VAE,
        "text_encoder": text_encoder_sizes(tokenizer),
    }
    # Two shards, as the published transformer has several.
    write_model(folder, COMPONENTS, networks, sizes, seed, sharded=("dit",))


def text_encoder_sizes(tokenizer: Any) -> Mapping[str, Any]:
    """Return the text encoder's config.json for the words of a tokenizer."""

    def token(name: str) -> Any:
        return tokenizer.convert_tokens_to_ids(f"<|{name}|>")

    return {
        "text_config": {
            **TEXT,
            "vocab_size": len(tokenizer),
            "bos_token_id": token("endoftext"),
            "eos_token_id": token("im_end"),
        },
        "vision_config": VISION,
        "image_token_id": token("image_pad"),
        "video_token_id": token("video_pad"),
        "vision_start_token_id": token("vision_start"),
        "vision_end_token_id": token("vision_end"),
        "tie_word_embeddings": False,
    }


def make_tokenizer(prefix: str, tokens: int) -> Any:
    """Train a byte-level tokenizer on a chat template's words, so that its prefix is as
    many tokens as in the real one.

    Raises AssertionError where it is not.
    """
    from transformers import Qwen2Tokenizer

    words = prefix + SUFFIX
    for token in SPECIAL_TOKENS:
        words = words.replace(token, "")
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bytewise = Qwen2Tokenizer().backend_tokenizer
    bytewise.train_from_iterator([words], trainer)
    model = json.loads(bytewise.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=131072,
    )
    if len(tokenizer(prefix).input_ids) != tokens:
        raise AssertionError(
            f"the chat template's words no longer make {tokens} tokens"
        )
    return tokenizer


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
