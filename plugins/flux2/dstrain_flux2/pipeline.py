"""FLUX.2's variants: which units each has, and where its inputs come from."""

from collections.abc import Mapping
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

LEAST_PIXELS = model_fn.DOWNSCALE**2


@dataclass(frozen=True)
class EmpiricalSchedule(FlowMatchSchedule):
    """Flow matching whose shift in inference depends on steps and size."""

    def sigmas(self, steps: int, tokens: int) -> Tensor:
        """Return (steps + 1,) fp32 sigmas for inference, from 1 to a final 0."""
        if self.shift is not None:
            return super().sigmas(steps, tokens)
        mu = empirical_mu(steps, tokens)
        return FlowMatchSchedule(base_mu=mu, max_mu=mu).sigmas(steps, tokens)


def empirical_mu(steps: int, tokens: int) -> float:
    """Return mu of the exponential shift: for 200 steps and for 10 a line over the number
    of tokens, between them a line over that of steps, and above 4300 tokens the first line
    (compute_empirical_mu of black-forest-labs/flux2, src/flux2/sampling.py).
    """
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190
    return slope * steps + at_200 - 200 * slope


# Training: the shift of DiffSynth-Studio at every size.
SCHEDULE = EmpiricalSchedule(training_mu=0.8, latents_per_token=1)


def never_used(
    layers: str, after: int, depth: int, *others: str
) -> Mapping[str, tuple[str, ...]]:
    """Return patterns of a text encoder's parameters that no loss reaches: those of the
    layers after the last whose states are taken, and others.

    layers: The name of the list of layers.
    """
    indices = [*map(str, range(after, depth)), "{last}"]
    return {"text_encoder": (*(f"{layers}.{i}.*" for i in indices), *others)}


KLEIN = PipelineSpec(
    components=("dit", "text_encoder", "vae", "tokenizer"),
    units=(
        units.encode_qwen_prompt,
        units.resize_edit_images,
        units.encode_edit_images,
        units.encode_image,
    ),
    model_fn=model_fn.predict_klein,
    decoders=(units.decode,),
    inputs={
        "prompt": Column("prompt"),
        "input_image": Column("image", "image", multiple=model_fn.DOWNSCALE),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
        "edit_image": Column("edit_image", "images", optional=True),
        # cap_pixels of encode_image_refs of black-forest-labs/flux2.
        "edit_pixels": Constant(1024**2, toy=32 * 48, check=at_least(LEAST_PIXELS)),
        "single_edit_pixels": Constant(
            2024**2, toy=64 * 64, check=at_least(LEAST_PIXELS)
        ),
    },
    schedule=SCHEDULE,
    denoiser_config={"in_channels": model_fn.CHANNELS, "guidance_embeds": False},
    latent_shape=model_fn.latent_shape,
    apply_guidance=apply_guidance,
    unused_parameters=never_used("model.layers", 27, 36, "model.norm.*", "lm_head.*"),
    defaults={"num_inference_steps": 4, "guidance_scale": 1.0},
)
KLEIN_BASE = replace(
    KLEIN,
    inputs={**KLEIN.inputs, "negative_prompt": InferenceOnly()},
    cfg_inputs={"prompt": "negative_prompt"},
    defaults={"num_inference_steps": 50, "guidance_scale": 4.0, "negative_prompt": ""},
)
DEV = replace(
    KLEIN,
    units=(units.encode_mistral_prompt, *KLEIN.units[1:]),
    model_fn=model_fn.predict,
    inputs={**KLEIN.inputs, "embedded_guidance": InferenceOnly("number")},
    denoiser_config={"in_channels": model_fn.CHANNELS, "guidance_embeds": True},
    unused_parameters=never_used(
        "model.language_model.layers",
        30,
        40,
        "model.language_model.norm.*",
        "lm_head.*",
        "model.vision_tower.*",
        "model.multi_modal_projector.*",
    ),
    defaults={
        "num_inference_steps": 50,
        "guidance_scale": 1.0,
        "embedded_guidance": 4.0,
    },
)

PIPELINES = {"dev": DEV, "klein": KLEIN, "klein-base": KLEIN_BASE}
