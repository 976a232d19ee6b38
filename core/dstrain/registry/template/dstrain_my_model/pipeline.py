"""Variants: their units, where their inputs come from, and the noise schedule."""

from dstrain.plugin import (
    Column,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
)
from dstrain.plugin.functional import apply_guidance

from . import model_fn, units

PIPELINES = {
    "base": PipelineSpec(
        components=("dit", "text_encoder", "vae"),
        units=(units.encode_prompt, units.encode_image),
        model_fn=model_fn.predict,
        decoders=(units.decode,),
        inputs={
            "prompt": Column("prompt"),
            "negative_prompt": InferenceOnly(),
            "input_image": Column("image", "image", multiple=model_fn.DOWNSCALE),
            "height": Measured("input_image", "height"),
            "width": Measured("input_image", "width"),
        },
        schedule=FlowMatchSchedule(shift=3.0, latents_per_token=1),
        latent_shape=model_fn.latent_shape,
        apply_guidance=apply_guidance,
        cfg_inputs={"prompt": "negative_prompt"},
        padded={"prompt_emb": 1, "prompt_mask": 1},
        defaults={
            "height": 64,
            "width": 64,
            "num_inference_steps": 20,
            "guidance_scale": 3.0,
            "negative_prompt": "",
        },
    )
}
