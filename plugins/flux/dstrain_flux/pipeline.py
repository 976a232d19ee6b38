"""FLUX's variants: which units each has, and where its inputs come from."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dstrain.plugin import (
    Column,
    Constant,
    EntryCount,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
    at_least,
    one_of,
)
from dstrain.plugin.functional import apply_guidance

from dstrain_flux import (
    adapters,
    control_units,
    image_prompt_units,
    model_fn,
    region_units,
    units,
)

SIDE_MULTIPLE = model_fn.DOWNSCALE * model_fn.PATCH

# Inference: the published scheduler_config.json, whose shift grows with the image.
# Training: shift 3 at every size and the table's end, both as DiffSynth-Studio has
# them.
SCHEDULE = FlowMatchSchedule(
    base_mu=0.5,
    max_mu=1.15,
    base_tokens=256,
    max_tokens=4096,
    training_mu=math.log(3),
    sigma_min=0.003 / 1.002,
    latents_per_token=model_fn.PATCH**2,
)


def beside_the_image(name: str) -> Column:
    """Return a column of images that show the same as those that are learned."""
    return Column(name, "image", multiple=SIDE_MULTIPLE, of="input_image")


def without(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return inputs, or their defaults, without one of them."""
    return {one: value for one, value in table.items() if one != name}


DEV = PipelineSpec(
    components=(
        "dit",
        "text_encoder_1",
        "text_encoder_2",
        "vae",
        "tokenizer_1",
        "tokenizer_2",
    ),
    units=(units.encode_clip, units.encode_prompt, units.encode_image),
    model_fn=model_fn.predict,
    decoders=(units.decode,),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_image": Column("image", "image", multiple=SIDE_MULTIPLE),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
        "embedded_guidance": InferenceOnly("number"),
    },
    schedule=SCHEDULE,
    denoiser_config={"in_channels": 64},
    latent_shape=model_fn.latent_shape,
    apply_guidance=apply_guidance,
    cfg_inputs={"prompt": "negative_prompt"},
    defaults={
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 28,
        "guidance_scale": 1.0,
        "embedded_guidance": 3.5,
    },
)
KONTEXT = replace(
    DEV,
    units=(*DEV.units, units.resize_kontext, units.encode_kontext),
    model_fn=model_fn.predict_kontext,
    inputs={
        **DEV.inputs,
        "kontext_images": Column("kontext_images", "images"),
        "kontext_pixels": Constant(
            units.KONTEXT_PIXELS, toy=32 * 32, check=at_least(SIDE_MULTIPLE**2)
        ),
    },
    defaults={**DEV.defaults, "embedded_guidance": 2.5},
)

FILL = replace(
    DEV,
    units=(*DEV.units, control_units.encode_fill),
    model_fn=model_fn.predict_fill,
    inputs={
        **without(DEV.inputs, "negative_prompt"),
        "flux_fill_image": beside_the_image("flux_fill_image"),
        "flux_fill_mask": Column(
            "flux_fill_mask",
            "image",
            mode="L",
            multiple=SIDE_MULTIPLE,
            of="flux_fill_image",
        ),
    },
    denoiser_config={"in_channels": 384},
    cfg_inputs={},
    defaults={**DEV.defaults, "num_inference_steps": 50, "embedded_guidance": 30.0},
)
# The published scheduler_config.json of FLUX.1-schnell, which shifts at no size; the end of
# the training table is that of the others.
SCHNELL = replace(
    DEV,
    units=(units.encode_clip, units.encode_schnell_prompt, units.encode_image),
    model_fn=model_fn.predict_schnell,
    inputs=without(DEV.inputs, "embedded_guidance"),
    schedule=FlowMatchSchedule(
        shift=1.0,
        sigma_min=SCHEDULE.sigma_min,
        latents_per_token=SCHEDULE.latents_per_token,
    ),
    denoiser_config={"in_channels": 64, "guidance_embeds": False},
    defaults={**without(DEV.defaults, "embedded_guidance"), "num_inference_steps": 4},
)

# Where no single block follows, what the text's tokens ask for in the last joint block
# and what follows is thrown away. The published ControlNets are so, but for the union.
UNUSED_IN_CONTROLNET = (
    "transformer_blocks.{last}.attn.add_q_proj.*",
    "transformer_blocks.{last}.attn.norm_added_q.*",
    "transformer_blocks.{last}.attn.to_add_out.*",
    "transformer_blocks.{last}.ff_context.*",
)
CONTROLNET = replace(
    DEV,
    components=("dit", "controlnet", *DEV.components[1:]),
    units=(*DEV.units, control_units.encode_control),
    model_fn=adapters.predict_controlnet,
    inputs={
        **DEV.inputs,
        "controlnet_image": beside_the_image("controlnet_image"),
        "controlnet_scale": InferenceOnly("number"),
    },
    unused_parameters={"controlnet": UNUSED_IN_CONTROLNET},
    defaults={**DEV.defaults, "controlnet_scale": 1.0},
)
CONTROLNET_UNION = replace(
    CONTROLNET,
    units=(*CONTROLNET.units, control_units.find_control_mode),
    model_fn=adapters.predict_controlnet_union,
    inputs={
        **CONTROLNET.inputs,
        "controlnet_processor_id": Column(
            "controlnet_processor_id", check=one_of(*control_units.CONTROL_MODES)
        ),
    },
    unused_parameters={},
)
CONTROLNET_INPAINT = replace(
    CONTROLNET,
    units=(*DEV.units, control_units.encode_masked_control),
    inputs={
        **CONTROLNET.inputs,
        "controlnet_inpaint_mask": Column(
            "controlnet_inpaint_mask",
            "image",
            mode="L",
            multiple=SIDE_MULTIPLE,
            of="controlnet_image",
        ),
    },
)
REDUX = replace(
    DEV,
    components=(*DEV.components, "image_encoder", "redux"),
    units=(
        *DEV.units,
        image_prompt_units.encode_redux_image,
        image_prompt_units.embed_redux_image,
    ),
    model_fn=model_fn.predict_redux,
    inputs={**DEV.inputs, "flux_redux_image": Column("flux_redux_image", "image")},
    unused_parameters={"image_encoder": ("head.*",)},
)
IPADAPTER = replace(
    DEV,
    components=("dit", "ipadapter", *DEV.components[1:], "image_encoder"),
    units=(*DEV.units, image_prompt_units.encode_ipadapter_images),
    model_fn=adapters.predict_ipadapter,
    inputs={
        **DEV.inputs,
        "ipadapter_images": Column("ipadapter_images", "images"),
        "ipadapter_scale": InferenceOnly("number"),
    },
    defaults={**DEV.defaults, "ipadapter_scale": 1.0},
)
ELIGEN = replace(
    DEV,
    units=(*DEV.units, region_units.encode_entities, region_units.resize_entity_masks),
    model_fn=model_fn.predict_regions,
    inputs={
        **DEV.inputs,
        "eligen_entity_prompts": Column("eligen_entity_prompts", "texts"),
        "eligen_entity_masks": Column(
            "eligen_entity_masks",
            "images",
            mode="L",
            multiple=SIDE_MULTIPLE,
            of="input_image",
            entries=EntryCount("eligen_entity_prompts"),
        ),
    },
)

PIPELINES = {
    "dev": DEV,
    "kontext": KONTEXT,
    "fill": FILL,
    "controlnet": CONTROLNET,
    "controlnet-union": CONTROLNET_UNION,
    "controlnet-inpaint": CONTROLNET_INPAINT,
    "redux": REDUX,
    "ip-adapter": IPADAPTER,
    "eligen": ELIGEN,
    "schnell": SCHNELL,
}
