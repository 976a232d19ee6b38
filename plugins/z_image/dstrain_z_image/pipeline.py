"""Z-Image's variants: which units each has, and where its inputs come from."""

import math
from dataclasses import replace

from dstrain.plugin import (
    Column,
    Constant,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
    at_least,
)

from dstrain_z_image import control, model_fn, omni, units

# Training draws from a table of shift 3, for each variant (FlowMatchScheduler of
# DiffSynth-Studio). Inference has the shift 6 of the published scheduler_config.json of
# Z-Image, whatever the image's size.
SHIFT, TRAINING_SHIFT = math.log(6), math.log(3)
SCHEDULE = FlowMatchSchedule(
    base_mu=SHIFT, max_mu=SHIFT, training_mu=TRAINING_SHIFT, latents_per_token=4
)

BASE = PipelineSpec(
    components=("dit", "text_encoder", "vae", "tokenizer"),
    units=(units.encode_prompt, units.encode_image),
    model_fn=model_fn.predict,
    decoders=(units.decode,),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_image": Column("image", "image", multiple=model_fn.SIDE_MULTIPLE),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
    },
    schedule=SCHEDULE,
    denoiser_config={"siglip_feat_dim": False},
    latent_shape=model_fn.latent_shape,
    apply_guidance=model_fn.apply_guidance,
    no_guidance=0.0,
    cfg_inputs={"prompt": "negative_prompt"},
    padded={"prompt_emb": 1, "prompt_mask": 1},
    # The last states but one are read.
    unused_parameters={"text_encoder": ("model.layers.{last}.*", "model.norm.*")},
    defaults={
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 50,
        "guidance_scale": 4.0,
        "negative_prompt": "",
    },
)

# Distilled: 8 steps without guidance (the publisher's inference.py). Its published
# scheduler_config.json has the shift of training.
TURBO = replace(
    BASE,
    schedule=FlowMatchSchedule(shift=3.0, latents_per_token=4),
    defaults={**BASE.defaults, "num_inference_steps": 8, "guidance_scale": 0.0},
)

# Defaults of ZImageOmniPipeline of diffusers. Its scheduler_config.json was not seen: the
# shift is the one that DiffSynth-Studio samples with, and that of the publisher's code.
OMNI = replace(
    TURBO,
    components=("dit", "text_encoder", "image_encoder", "vae", "tokenizer"),
    units=(
        omni.resize_edit_images,
        omni.encode_texts,
        omni.encode_edit_images,
        omni.embed_edit_images,
        units.encode_image,
    ),
    model_fn=model_fn.predict_omni,
    latent_shape=model_fn.latent_shape_omni,
    inputs={
        **BASE.inputs,
        "edit_image": Column("edit_image", "images", optional=True),
        "edit_pixels": Constant(
            1024 * 1024, toy=64 * 64, check=at_least(model_fn.SIDE_MULTIPLE**2)
        ),
    },
    denoiser_config={"siglip_feat_dim": True},
    padded={"prompt_emb": 1, "prompt_parts": 1},
    unused_parameters={**BASE.unused_parameters, "image_encoder": ("head.*",)},
    defaults={"num_inference_steps": 50, "guidance_scale": 5.0, "negative_prompt": ""},
)

CONTROLNET_UNION = replace(
    TURBO,
    components=("dit", "controlnet", *BASE.components[1:]),
    units=(*BASE.units, control.encode_control_image),
    model_fn=control.predict_controlled,
    inputs={
        **BASE.inputs,
        "controlnet_image": Column(
            "controlnet_image",
            "image",
            multiple=model_fn.SIDE_MULTIPLE,
            of="input_image",
        ),
        "controlnet_scale": InferenceOnly("number"),
    },
    # ZImageControlNetPipeline of diffusers.
    defaults={**TURBO.defaults, "controlnet_scale": 0.75},
)

PIPELINES = {
    "base": BASE,
    "turbo": TURBO,
    "omni": OMNI,
    "controlnet-union": CONTROLNET_UNION,
}
