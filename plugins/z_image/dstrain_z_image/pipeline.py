"""Z-Image's variants: which units each has, and where its inputs come from."""

import math
from dataclasses import replace

import dstrain.plugin as plugin
from dstrain.plugin import Column, FlowMatchSchedule, InferenceOnly, Measured

from dstrain_z_image import model_fn, units

SIDES = model_fn.SIDE_MULTIPLE
SHIFT = math.log(6)
"""That of Z-Image's scheduler_config.json; training has DiffSynth-Studio's 3 for all."""

SAMPLING = {"num_inference_steps": 50, "guidance_scale": 4.0, "negative_prompt": ""}

BASE = plugin.PipelineSpec(
    components=("dit", "text_encoder", "vae", "tokenizer"),
    units=(units.encode_prompt, units.encode_image),
    model_fn=model_fn.predict,
    decoders=(units.decode,),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_image": Column("image", "image", multiple=SIDES),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
    },
    schedule=FlowMatchSchedule(base_mu=SHIFT, max_mu=SHIFT, training_mu=math.log(3)),
    denoiser_config={"siglip_feat_dim": False},
    latent_shape=model_fn.latent_shape,
    apply_guidance=model_fn.apply_guidance,
    no_guidance=0.0,
    cfg_inputs={"prompt": "negative_prompt"},
    padded={"prompt_emb": 1, "prompt_parts": 1},
    unused_parameters={"text_encoder": ("model.layers.{last}.*", "model.norm.*")},
    defaults={"height": 1024, "width": 1024, **SAMPLING},
)
# Eight steps without guidance: inference.py of Tongyi-MAI/Z-Image.
TURBO = replace(
    BASE,
    schedule=FlowMatchSchedule(shift=3.0),
    defaults={**BASE.defaults, "num_inference_steps": 8, "guidance_scale": 0.0},
)
# Guidance is that of ZImageOmniPipeline of diffusers.
OMNI = replace(
    TURBO,
    components=(*BASE.components, "image_encoder"),
    units=(units.encode_edit_prompt, units.encode_edit_images, units.encode_image),
    model_fn=model_fn.predict_edit,
    inputs={**BASE.inputs, "edit_image": Column("edit_image", "images", optional=True)},
    denoiser_config={"siglip_feat_dim": True},
    unused_parameters={**BASE.unused_parameters, "image_encoder": ("head.*",)},
    defaults={**BASE.defaults, "guidance_scale": 5.0},
    defaults_from={"edit_image": units.edited_size},
)
UNION = replace(
    TURBO,
    components=(*BASE.components, "controlnet"),
    units=(*BASE.units, units.encode_control_image),
    model_fn=model_fn.predict_controlled,
    inputs={
        **BASE.inputs,
        "controlnet_image": Column(
            "controlnet_image", "image", multiple=SIDES, of="input_image"
        ),
        "controlnet_scale": InferenceOnly("number"),
    },
    defaults={**TURBO.defaults, "controlnet_scale": 0.75},  # as in diffusers
)
PIPELINES = {"base": BASE, "turbo": TURBO, "omni": OMNI, "controlnet-union": UNION}
