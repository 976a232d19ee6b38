"""A Wan of toy sizes with random weights, written as the published model is laid out."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import write_model

from dstrain_wan.components import COMPONENTS, CONFIGS

# Sizes of the networks, and what the published folders have beside weights. Encoders
# have dropout, so that one left in training mode is noticed, and initial ranges that
# make prompts differ clearly.
TOY: Mapping[str, Any] = json.loads((CONFIGS / "toy.json").read_bytes())
DIT = TOY["dit"]
DITS = TOY["dit_changes"]
VAE = TOY["vae"]
VAE_5B = TOY["vae_5b"]
TEXT = TOY["text_encoder"]
IMAGE = TOY["image_encoder"]
SCHEDULER = TOY["scheduler"]
IMAGE_PROCESSOR = TOY["image_processor"]
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
    """Return a unigram tokenizer of the umT5 kind that knows ASCII's letters, digits
    and marks, and a few words.
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
