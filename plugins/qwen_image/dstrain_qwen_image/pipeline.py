"""Qwen-Image's variants: which units each has, and where its inputs come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

SAMPLING: Mapping[str, Any] = MappingProxyType(
    {"num_inference_steps": 50, "guidance_scale": 4.0, "negative_prompt": " "}
)

# In the last block, what the text's tokens ask for and what follows is thrown away; the
# text encoder is used without its head, and without its visual tower where there are no
# pictures.
LAST_TEXT = tuple(
    f"transformer_blocks.{{last}}.{part}.*"
    for part in ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
)


@dataclass(frozen=True)
class Variant:
    """What one variant has of its own; `units` are the functions of its units, in
    order.

    defaults: those of inference. unused_parameters: patterns of the text encoder's parameters
    that no loss reaches.
    """

    units: tuple[Callable[..., Any], ...]
    inputs: Mapping[str, Input]
    predict: Callable[..., Any] = model_fn.predict_edit
    components: tuple[str, ...] = ("dit", "text_encoder", "vae", "processor")
    latent_shape: Callable[..., Any] = model_fn.latent_shape_edit
    defaults: Mapping[str, Any] = field(default_factory=lambda: SAMPLING)
    unused_parameters: tuple[str, ...] = ("lm_head.*",)


TEXT_TO_IMAGE: Mapping[str, Input] = MappingProxyType(
    {
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_image": Column("image", "image", multiple=SIDE_MULTIPLE),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
    }
)
# VAE_IMAGE_SIZE and CONDITION_IMAGE_SIZE of diffusers' QwenImageEditPlusPipeline.
EDIT: Mapping[str, Input] = MappingProxyType(
    {
        **TEXT_TO_IMAGE,
        "edit_image": Column("edit_image", "image"),
        "edit_pixels": Constant(
            1024 * 1024, toy=64 * 64, check=at_least(units.EDIT_MULTIPLE**2)
        ),
    }
)
EDIT_SEVERAL: Mapping[str, Input] = MappingProxyType(
    {
        **EDIT,
        "edit_image": Column("edit_image", "images"),
        "edit_text_pixels": Constant(
            384 * 384, toy=64 * 64, check=at_least(units.EDIT_MULTIPLE**2)
        ),
    }
)
SEVERAL = Variant(
    (
        units.resize_edit_images,
        units.encode_numbered_prompt,
        units.encode_edit_images,
        units.encode_image,
    ),
    EDIT_SEVERAL,
)

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "base": Variant(
            (units.encode_prompt, units.encode_image),
            TEXT_TO_IMAGE,
            model_fn.predict,
            ("dit", "text_encoder", "vae", "tokenizer"),
            model_fn.latent_shape,
            MappingProxyType({"height": 1024, "width": 1024, **SAMPLING}),
            ("lm_head.*", "model.visual.*"),
        ),
        "edit": Variant(
            (
                units.resize_edit_image,
                units.encode_edit_prompt,
                units.encode_edit_images,
                units.encode_image,
            ),
            EDIT,
        ),
        "edit-2509": SEVERAL,
        "edit-2511": SEVERAL,
    }
)


def variants_for(dit: Mapping[str, Any]) -> tuple[str, ...]:
    """The variants that a denoiser with this configuration (config.json's content) can
    be.
    """
    return ("edit-2511",) if dit.get("zero_cond_t") else ("base", "edit", "edit-2509")


def build(variant: str) -> PipelineSpec:
    """Wire one of the variants that the record names."""
    row = VARIANTS[variant]
    return PipelineSpec(
        family="qwen_image",
        variant=variant,
        components=row.components,
        units=tuple(Unit(function) for function in row.units),
        model_fn=FunctionSpec.of(row.predict, given=GIVEN_TO_MODEL_FN),
        decoders=(Unit(units.decode, given=GIVEN_TO_DECODER),),
        inputs=row.inputs,
        schedule=SCHEDULE,
        latent_shape=FunctionSpec.of(row.latent_shape),
        apply_guidance=model_fn.apply_guidance,
        cfg_inputs=MappingProxyType({"prompt": "negative_prompt"}),
        padded=MappingProxyType({"prompt_emb": 1, "prompt_mask": 1}),
        unused_parameters=MappingProxyType(
            {"dit": LAST_TEXT, "text_encoder": row.unused_parameters}
        ),
        defaults=row.defaults,
    )
