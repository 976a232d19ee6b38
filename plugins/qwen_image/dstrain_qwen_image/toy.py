"""A Qwen-Image of toy sizes with random weights, written as the published model is laid
out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import write_model
from tokenizers import pre_tokenizers, trainers

from dstrain_qwen_image.components import COMPONENTS, CONFIGS
from dstrain_qwen_image.units import (
    EDIT_PREFIX,
    EDIT_PREFIX_TOKENS,
    PREFIX,
    PREFIX_TOKENS,
    SUFFIX,
)

# Sizes of the networks, and what the published folders have beside weights. Encoders
# have dropout, so that one left in training mode is noticed, and initial ranges that
# make prompts differ clearly.
TOY: Mapping[str, Any] = json.loads((CONFIGS / "toy.json").read_bytes())
DIT = TOY["dit"]
VAE = TOY["vae"]
TEXT = TOY["text"]
VISION = TOY["vision"]
SCHEDULER = TOY["scheduler"]
PREPROCESSOR = TOY["preprocessor"]
MODEL_INDEX = TOY["model_index"]
SPECIAL_TOKENS = TOY["special_tokens"]
EDITS = TOY["edits"]
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
