"""The variants: which units each has, where its inputs come from, and the noise schedule."""

from types import MappingProxyType

from dstrain.graph.spec import GIVEN_TO_DECODER, GIVEN_TO_MODEL_FN
from dstrain.graph.unit import FunctionSpec
from dstrain.plugin import (
    Column,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
    Unit,
)
from dstrain.plugin.functional import apply_guidance

from . import model_fn, units


def build(variant: str) -> PipelineSpec:
    """Wire a variant; dstrain asks only for those that the record names."""
    return PipelineSpec(
        family="my_model",
        variant=variant,
        components=("dit", "text_encoder", "vae"),
        units=(Unit(units.encode_prompt), Unit(units.encode_image)),
        model_fn=FunctionSpec.of(model_fn.predict, given=GIVEN_TO_MODEL_FN),
        decoders=(Unit(units.decode, given=GIVEN_TO_DECODER),),
        inputs=MappingProxyType(
            {
                "prompt": Column("prompt"),
                "negative_prompt": InferenceOnly(),
                "input_image": Column("image", "image", multiple=model_fn.DOWNSCALE),
                "height": Measured("input_image", "height"),
                "width": Measured("input_image", "width"),
            }
        ),
        schedule=FlowMatchSchedule(shift=3.0, latents_per_token=1),
        latent_shape=FunctionSpec.of(model_fn.latent_shape),
        apply_guidance=apply_guidance,
        cfg_inputs=MappingProxyType({"prompt": "negative_prompt"}),
        padded=MappingProxyType({"prompt_emb": 1, "prompt_mask": 1}),
        defaults=MappingProxyType(
            {
                "height": 64,
                "width": 64,
                "num_inference_steps": 20,
                "guidance_scale": 3.0,
                "negative_prompt": "",
            }
        ),
    )
