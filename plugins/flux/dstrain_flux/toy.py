"""A FLUX of toy sizes with random weights, written as the published model is laid out."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import write_model
from tokenizers import pre_tokenizers

from dstrain_flux.components import COMPONENTS, CONFIGS
from dstrain_flux.units import CLIP_TOKENS, T5_TOKENS

# Sizes of the networks, and what the published folders have beside weights. Encoders
# have dropout, so that one left in training mode is noticed, and initial ranges that
# make prompts differ clearly.
TOY: Mapping[str, Any] = json.loads((CONFIGS / "toy.json").read_bytes())
DIT = TOY["dit"]
VAE = TOY["vae"]
CLIP = TOY["text_encoder_1"]
T5 = TOY["text_encoder_2"]
SCHEDULER = TOY["scheduler"]
MODEL_INDEX = TOY["model_index"]
PIPELINES = {"dev": "FluxPipeline", "kontext": "FluxKontextPipeline"}
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
