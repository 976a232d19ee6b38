"""SDXL's variants: which units each has, and where its inputs come from."""

from dataclasses import replace
from typing import Any

from dstrain.plugin import (
    Column,
    Constant,
    InferenceOnly,
    Measured,
    PipelineSpec,
    between,
)
from dstrain.plugin.functional import apply_guidance
from dstrain.plugin.noise import Diffusion, MakeSampler, diffusers_sampler

from dstrain_sdxl import model_fn, units
from dstrain_sdxl.components import COMPONENTS
from dstrain_sdxl.model_fn import DOWNSCALE

ORIGINAL = ("original_height", "original_width")
AXES: Any = ("height", "width", *ORIGINAL, "crop_top", "crop_left")
BETAS = {"beta_start": 0.00085, "beta_end": 0.012}


def sampled_by_euler(**config: Any) -> dict[str, MakeSampler]:
    """Return the published sampler, with further entries of its configuration."""
    betas = {**BETAS, "beta_schedule": "scaled_linear"}
    return {"euler": diffusers_sampler("EulerDiscreteScheduler", **betas, **config)}


BASE = PipelineSpec(
    components=tuple(component.name for component in COMPONENTS),
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
        "input_image": Column("image", "image", multiple=DOWNSCALE),
        **{axis: Measured("input_image", axis) for axis in AXES},
        "clip_skip": Constant(2, check=between(2, 12)),
    },
    schedule=Diffusion("epsilon", **BETAS),
    # The published scheduler_config.json.
    samplers=sampled_by_euler(steps_offset=1, timestep_spacing="leading"),
    denoiser_config={"in_channels": 4, "prediction_type": "epsilon"},
    latent_shape=model_fn.latent_shape,
    apply_guidance=apply_guidance,
    cfg_inputs={"prompt": "negative_prompt"},
    # Behind the layer that is used.
    unused_parameters={
        "text_encoder": ("encoder.layers.{last}.*", "final_layer_norm.*")
    },
    defaults={
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 50,
        "sampler": "euler",
        "guidance_scale": 5.0,
        "negative_prompt": "",
    },
)

# Lin et al. 2024, "Common Diffusion Noise Schedules and Sample Steps are Flawed".
V = replace(
    BASE,
    schedule=Diffusion("v", zero_terminal_snr=True, **BETAS),
    denoiser_config={"in_channels": 4, "prediction_type": "v_prediction"},
    samplers=sampled_by_euler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    ),
)
INPAINT = replace(
    BASE,
    units=(*BASE.units, units.encode_inpaint),
    model_fn=model_fn.predict_inpaint,
    inputs={
        **BASE.inputs,
        # In training, what is learned; a start image may be another one.
        "inpaint_image": Column("image", "image", multiple=DOWNSCALE),
        "inpaint_mask": Column(
            "inpaint_mask", "image", mode="L", multiple=DOWNSCALE, of="inpaint_image"
        ),
    },
    denoiser_config={"in_channels": 9, "prediction_type": "epsilon"},
    defaults={**BASE.defaults, "guidance_scale": 7.5},
)

PIPELINES = {"base": BASE, "v": V, "inpaint": INPAINT}
