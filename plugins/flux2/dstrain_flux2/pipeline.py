"""FLUX.2's variants: which units each has, and where its inputs come from."""

from dataclasses import dataclass, replace

from dstrain.plugin import (
    Column,
    Constant,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
    at_least,
)
from dstrain.plugin.functional import apply_guidance
from torch import Tensor

from dstrain_flux2 import model_fn, units

AREA = at_least(model_fn.DOWNSCALE**2)


@dataclass(frozen=True)
class EmpiricalSchedule(FlowMatchSchedule):
    """Flow matching whose shift in inference depends on steps and size
    (compute_empirical_mu of black-forest-labs/flux2, src/flux2/sampling.py).
    """

    def sigmas(self, steps: int, tokens: int) -> Tensor:
        """Return (steps + 1,) fp32 sigmas for inference, from 1 to a final 0."""
        if self.shift is not None:
            return super().sigmas(steps, tokens)
        mu = 0.00016927 * tokens + 0.45666666  # of 200 steps, or of many tokens
        if tokens <= 4300:
            of_10_steps = 8.73809524e-05 * tokens + 1.89833333
            mu += (mu - of_10_steps) / 190 * (steps - 200)
        return FlowMatchSchedule(base_mu=mu, max_mu=mu).sigmas(steps, tokens)


def unused(model: str, layers: range, *others: str) -> dict[str, tuple[str, ...]]:
    """Return patterns of a text encoder's parameters that no loss reaches: those after the
    states that are read; a toy has one such layer.
    """
    above = (f"{model}.layers.{index}.*" for index in (*layers, "{last}"))
    return {"text_encoder": (*above, f"{model}.norm.*", "lm_head.*", *others)}


SIDES = {"height": 1024, "width": 1024}
KLEIN = PipelineSpec(
    components=("dit", "text_encoder", "vae", "tokenizer"),
    units=(units.encode_qwen_prompt, units.encode_edit_images, units.encode_image),
    model_fn=model_fn.predict_klein,
    decoders=(units.decode,),
    inputs={
        "prompt": Column("prompt"),
        "input_image": Column("image", "image", multiple=model_fn.DOWNSCALE),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
        "edit_image": Column("edit_image", "images", optional=True),
        # The limits of encode_image_refs of black-forest-labs/flux2.
        "edit_pixels": Constant(1024**2, toy=32**2, check=AREA),
        "single_edit_pixels": Constant(2024**2, toy=64**2, check=AREA),
    },
    # Training has DiffSynth-Studio's shift at every size.
    schedule=EmpiricalSchedule(training_mu=0.8, latents_per_token=1),
    denoiser_config={"in_channels": model_fn.CHANNELS, "guidance_embeds": False},
    latent_shape=model_fn.latent_shape,
    apply_guidance=apply_guidance,
    unused_parameters=unused("model", range(27, 36)),
    defaults={**SIDES, "num_inference_steps": 4, "guidance_scale": 1.0},
    defaults_from={"edit_image": units.edited_size},
)
GUIDANCE = {"guidance_scale": 4.0, "negative_prompt": ""}
KLEIN_BASE = replace(
    KLEIN,
    inputs={**KLEIN.inputs, "negative_prompt": InferenceOnly()},
    cfg_inputs={"prompt": "negative_prompt"},
    defaults={**SIDES, "num_inference_steps": 50, **GUIDANCE},
)
SEEING = ("model.vision_tower.*", "model.multi_modal_projector.*")
DEV = replace(
    KLEIN,
    units=(units.encode_mistral_prompt, *KLEIN.units[1:]),
    model_fn=model_fn.predict,
    inputs={**KLEIN.inputs, "embedded_guidance": InferenceOnly("number")},
    denoiser_config={**KLEIN.denoiser_config, "guidance_embeds": True},
    unused_parameters=unused("model.language_model", range(30, 40), *SEEING),
    defaults={**KLEIN.defaults, "num_inference_steps": 50, "embedded_guidance": 4.0},
)
PIPELINES = {"dev": DEV, "klein": KLEIN, "klein-base": KLEIN_BASE}
