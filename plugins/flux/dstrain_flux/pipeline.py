"""FLUX's variants: which units each has, and where its inputs come from."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dstrain.graph.inputs import (
    Column,
    Constant,
    InferenceOnly,
    Input,
    Measured,
    at_least,
)
from dstrain.graph.schedule import FlowMatchSchedule
from dstrain.graph.spec import GIVEN_TO_DECODER, GIVEN_TO_MODEL_FN, PipelineSpec
from dstrain.graph.unit import FunctionSpec, Unit
from dstrain.models.functional import apply_guidance

from dstrain_flux import model_fn, units

SIDE_MULTIPLE = model_fn.DOWNSCALE * model_fn.PATCH

# Inference: the published scheduler_config.json, whose shift grows with the picture.
# Training: shift 3 at every size and the table's end, both as the reference documents
# have them.
SCHEDULE = FlowMatchSchedule(
    base_mu=0.5,
    max_mu=1.15,
    base_tokens=256,
    max_tokens=4096,
    training_mu=math.log(3),
    sigma_min=0.003 / 1.002,
    latents_per_token=model_fn.PATCH**2,
)


@dataclass(frozen=True)
class Variant:
    """What a variant has of its own: its denoiser's call, units in order, inputs, and
    inference's defaults.
    """

    predict: Callable[..., Any]
    units: tuple[Callable[..., Any], ...]
    inputs: Mapping[str, Input]
    defaults: Mapping[str, Any]


TEXT_TO_IMAGE_UNITS = (units.encode_clip, units.encode_prompt, units.encode_image)
TEXT_TO_IMAGE: Mapping[str, Input] = MappingProxyType(
    {
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_image": Column("image", "image", multiple=SIDE_MULTIPLE),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
        "embedded_guidance": InferenceOnly("number"),
    }
)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 28,
        "guidance_scale": 1.0,
        "embedded_guidance": 3.5,
    }
)

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "dev": Variant(model_fn.predict, TEXT_TO_IMAGE_UNITS, TEXT_TO_IMAGE, DEFAULTS),
        "kontext": Variant(
            model_fn.predict_kontext,
            (*TEXT_TO_IMAGE_UNITS, units.resize_kontext, units.encode_kontext),
            {
                **TEXT_TO_IMAGE,
                "kontext_images": Column("kontext_images", "images"),
                "kontext_pixels": Constant(
                    units.KONTEXT_PIXELS, toy=32 * 32, check=at_least(SIDE_MULTIPLE**2)
                ),
            },
            {**DEFAULTS, "embedded_guidance": 2.5},
        ),
    }
)


def build(variant: str) -> PipelineSpec:
    """Wire one of the variants that the record names."""
    row = VARIANTS[variant]
    return PipelineSpec(
        family="flux",
        variant=variant,
        components=(
            "dit",
            "text_encoder_1",
            "text_encoder_2",
            "vae",
            "tokenizer_1",
            "tokenizer_2",
        ),
        units=tuple(Unit(function) for function in row.units),
        model_fn=FunctionSpec.of(row.predict, given=GIVEN_TO_MODEL_FN),
        decoders=(Unit(units.decode, given=GIVEN_TO_DECODER),),
        inputs=row.inputs,
        schedule=SCHEDULE,
        latent_shape=FunctionSpec.of(model_fn.latent_shape),
        apply_guidance=apply_guidance,
        cfg_inputs=MappingProxyType({"prompt": "negative_prompt"}),
        defaults=row.defaults,
    )
