"""What to use here in place of options, models and variables of other trainers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

TABLE = Path(__file__).with_suffix(".json")
FAMILIES = "no family here trains it; `dstrain models` lists what can be trained"
MODELS = ("sd", "sd1*", "sd2*", "sd3*", "hunyuan*", "lumina*", "anima*")
"""Names by which other trainers call models that no family of this project trains."""
NAMES = MappingProxyType(
    {
        "use --model sdxl": ("STABLE_DIFFUSION_XL_*", "stable_diffusion_xl*"),
        "it is an SDXL in one file: use --model sdxl --model_paths FILE": (
            "illustrious*",
            "noob*",
            "pony*",
        ),
        "use --model z_image": ("Z_IMAGE", "z-image*", "zimage*"),
        "use --model flux2": ("FLUX_2", "flux2_klein*", "flux_2"),
    }
)
"""Families here -> their names in OneTrainer, ai-toolkit, SimpleTuner and musubi-tuner."""
INPUTS = """blockwise_controlnet_image blockwise_controlnet_inpaint_mask
  camera_control_direction camera_control_speed context_image control_video
  controlnet_image controlnet_inpaint_mask controlnet_processor_id controlnet_scale
  edit_image eligen_entity_masks eligen_entity_prompts embedded_guidance end_image
  flux_fill_image flux_fill_mask flux_redux_image inpaint_image inpaint_mask input_image
  input_video ipadapter_images ipadapter_scale kontext_images layer_input_image layer_num
  motion_bucket_id reference_image vace_reference_image vace_video vace_video_mask"""
"""What variants here are given for inference beside the prompts."""
VARIABLES = MappingProxyType(
    {
        "DIFFSYNTH_ATTENTION_IMPLEMENTATION": "attention is what DIFFUSERS_ATTN_BACKEND names, by default torch's own",
        "DIFFSYNTH_DISK_MAP_BUFFER_SIZE": "weights are read from disk one by one, without a buffer",
    }
)
"""Environment variables of DiffSynth-Studio that have no effect, each with the reason."""


def advice() -> Mapping[str, Sequence[str]]:
    """Return each line of advice with the flags that it is for, without dashes; `*`
    stands for anything.
    """
    table: Mapping[str, Sequence[str]] = json.loads(TABLE.read_text("utf-8"))
    return table


def hints() -> dict[str, str]:
    """Return word -> what to do instead: `--NAME` for an option, `--NAME VALUE` for its
    value, `$NAME` for a variable.
    """
    options = {f"--{flag}": line for line, flags in advice().items() for flag in flags}
    models = {f"--model {name}": FAMILIES for name in MODELS}
    models |= {f"--model {name}": line for line, one in NAMES.items() for name in one}
    inputs = {f"--{name}": f"use --input {name}=VALUE" for name in INPUTS.split()}
    variables = {f"${name}": why for name, why in VARIABLES.items()}
    return {**inputs, **options, **models, **variables}
