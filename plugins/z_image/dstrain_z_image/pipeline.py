"""Z-Image's variants: which units each has, and where its inputs come from."""

import math

from dstrain.plugin import (
    Column,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
)

from dstrain_z_image import model_fn, units

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

PIPELINES = {"base": BASE}
