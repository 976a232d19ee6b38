"""SDXL's variants: which units each has, and where its inputs come from."""

from dstrain.plugin import (
    Column,
    Constant,
    InferenceOnly,
    Measured,
    PipelineSpec,
    at_least,
)
from dstrain.plugin.functional import apply_guidance
from dstrain.plugin.noise import Diffusion, diffusers_sampler

from dstrain_sdxl import model_fn, units

# The layers behind the one that is used, which are skipped.
UNUSED_IN_CLIP = ("encoder.layers.{last}.*", "final_layer_norm.*")

BASE = PipelineSpec(
    components=(
        "unet",
        "text_encoder",
        "text_encoder_2",
        "vae",
        "tokenizer",
        "tokenizer_2",
    ),
    units=(
        units.encode_prompt,
        units.encode_prompt_2,
        units.encode_sizes,
        units.encode_image,
    ),
    model_fn=model_fn.predict,
    decoders=(units.decode,),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_image": Column("image", "image", multiple=model_fn.DOWNSCALE),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
        "clip_skip": Constant(2, check=at_least(1)),
    },
    schedule=Diffusion("epsilon", "scaled_linear", beta_start=0.00085, beta_end=0.012),
    # The published scheduler_config.json.
    samplers={
        "euler": diffusers_sampler(
            "EulerDiscreteScheduler",
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        )
    },
    denoiser_config={"in_channels": 4},
    latent_shape=model_fn.latent_shape,
    apply_guidance=apply_guidance,
    cfg_inputs={"prompt": "negative_prompt"},
    unused_parameters={"text_encoder": UNUSED_IN_CLIP},
    defaults={
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 50,
        "sampler": "euler",
        "guidance_scale": 5.0,
        "negative_prompt": "",
    },
)

PIPELINES = {"base": BASE}
