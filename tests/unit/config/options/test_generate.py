"""The options of `dstrain generate` are exactly the public ones."""

from dstrain import GenerateConfig
from dstrain.config import flags

PUBLIC_GENERATE_FLAGS = """
dataset denoising_strength fp8_models framewise_decoding guidance_scale height hub input lora mixed_precision model
model_id model_id_with_origin_paths model_paths negative_prompt num_frames num_inference_steps offload_models
on_long_prompt output overwrite prompt quant_options run seed tile_size tile_stride tiled toy
trajectory variant width
"""


def test_the_public_flags_are_these() -> None:
    names = sorted(flag.name for flag in flags(GenerateConfig))
    assert names == PUBLIC_GENERATE_FLAGS.split()
