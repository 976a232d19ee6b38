"""Qwen-Image's variants: which units each has, and where its inputs come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dstrain.errors import UsageError, nearest
from dstrain.schedule import FlowMatchSchedule
from dstrain.sources import Column, Given, Size, Source
from dstrain.unit import Signature, Unit
from dstrain.wiring import GIVEN_TO_DECODER, GIVEN_TO_MODEL_FN, Wiring

from dstrain_qwen_image import model_fn, units

SIDE_MULTIPLE = model_fn.DOWNSCALE * model_fn.PATCH

# The published scheduler_config.json; training_mu is the mu of the base size.
SCHEDULE = FlowMatchSchedule(
    base_mu=0.5,
    max_mu=0.9,
    base_tokens=256,
    max_tokens=8192,
    training_mu=0.8,
    shift_terminal=0.02,
    latents_per_token=model_fn.PATCH**2,
)

# In the last block, what the text's tokens ask for and what follows is thrown away; the text encoder is used
# without its head, and without pictures.
UNREACHED = MappingProxyType(
    {
        "dit": tuple(
            f"transformer_blocks.{{last}}.{part}.*"
            for part in ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
        ),
        "text_encoder": ("lm_head.*", "model.visual.*"),
    }
)


@dataclass(frozen=True)
class Variant:
    """What one variant has of its own: the functions of its units, in order, and its inputs."""

    units: tuple[Callable[..., Any], ...]
    inputs: Mapping[str, Source]


TEXT_TO_IMAGE: Mapping[str, Source] = MappingProxyType(
    {
        "prompt": Column("prompt"),
        "negative_prompt": Given(),
        "input_image": Column("image", "picture", multiple=SIDE_MULTIPLE),
        "height": Size("input_image", "height"),
        "width": Size("input_image", "width"),
    }
)

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "base": Variant((units.encode_prompt, units.encode_image), TEXT_TO_IMAGE),
    }
)


def build(variant: str) -> Wiring:
    """Wire one variant; raises UsageError when there is none of that name."""
    if variant not in VARIANTS:
        raise UsageError(
            "qwen_image", f"no variant named {variant!r}; there are: {', '.join(VARIANTS)}{nearest(variant, VARIANTS)}"
        )
    row = VARIANTS[variant]
    return Wiring(
        family="qwen_image",
        variant=variant,
        components=("dit", "text_encoder", "vae", "tokenizer"),
        units=tuple(Unit.of(function) for function in row.units),
        model_fn=Signature.of(model_fn.predict, given=GIVEN_TO_MODEL_FN),
        decoders=(Unit.of(units.decode, given=GIVEN_TO_DECODER),),
        inputs=row.inputs,
        schedule=SCHEDULE,
        latent_shape=Signature.of(model_fn.latent_shape),
        guide=model_fn.guide,
        per_side=MappingProxyType({"prompt": "negative_prompt"}),
        padded=MappingProxyType({"prompt_emb": 1, "prompt_mask": 1}),
        unreached=UNREACHED,
    )
