"""Wan's variants: which units each has, where its inputs come from, and which expert
acts when.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dstrain.plugin import (
    Column,
    Constant,
    ExpertSchedule,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
    at_least,
    between,
    one_of,
)
from dstrain.plugin.functional import apply_guidance
from dstrain.plugin.noise import diffusers_sampler

from dstrain_wan import camera, control, model_fn, motion, units, vace

FRAMES_PER_LATENT = 4
SHIFT = 5.0
SCHEDULE = FlowMatchSchedule(shift=SHIFT, latents_per_token=model_fn.PATCH**2)
# sample_solver of the published generate.py, as diffusers has it.
UNIPC = diffusers_sampler(
    "UniPCMultistepScheduler",
    prediction_type="flow_prediction",
    use_flow_sigmas=True,
    flow_shift=SHIFT,
)

# sample_neg_prompt of the published configuration, wan/configs/shared_config.py.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


def video(multiple: int, fps: float) -> Mapping[str, Any]:
    """Return how a video is loaded: sides in multiples of pixels, frames per second."""
    return {"multiple": multiple, "frame_multiple": FRAMES_PER_LATENT, "fps": fps}


def another_video(name: str, optional: bool = True) -> Column:
    """Return a column of videos beside those that are learned, as large and as long."""
    shape = video(16, 16.0)
    return Column(name, "video", optional=optional, of="input_video", **shape)


def first_frame(
    multiple: int = 16, fps: float = 16.0, optional: bool = False
) -> Column:
    """Return the column of the video's first frame."""
    return Column(
        "video", "image", frame="first", optional=optional, **video(multiple, fps)
    )


def last_frame(optional: bool = True) -> Column:
    """Return the column of the video's last frame."""
    return replace(
        first_frame(optional=optional), frame="last", least_frames=1 + FRAMES_PER_LATENT
    )


def experts(boundary: float, *companions: str) -> ExpertSchedule:
    """Return the experts of Wan 2.2 A14B: `dit` from the boundary, 0 to 1000, up to
    pure noise, `dit2` below it; each with companions of its own.
    """
    return ExpertSchedule(
        "dit",
        {"dit": (boundary, 1000.0), "dit2": (0.0, boundary)},
        {name: {"dit": name, "dit2": f"{name}2"} for name in companions},
    )


# Defaults of inference are those of the published configurations (wan/configs).
TEXT_TO_VIDEO = PipelineSpec(
    components=("dit", "text_encoder", "vae", "tokenizer"),
    units=(units.encode_prompt, units.encode_video),
    model_fn=model_fn.predict,
    decoders=(units.decode,),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_video": Column("video", "video", **video(16, 16.0)),
        "height": Measured("input_video", "height"),
        "width": Measured("input_video", "width"),
        "num_frames": Measured("input_video", "frames"),
        "fps": Constant(16.0, check=at_least(1)),
    },
    schedule=SCHEDULE,
    samplers={"unipc": UNIPC},
    denoiser_config={"in_channels": 16, "out_channels": 16, "image_dim": False},
    latent_shape=model_fn.latent_shape,
    apply_guidance=apply_guidance,
    cfg_inputs={"prompt": "negative_prompt"},
    padded={"prompt_emb": 1},
    defaults={
        "height": 480,
        "width": 832,
        "num_frames": 81,
        "num_inference_steps": 50,
        "sampler": "unipc",
        "guidance_scale": 5.0,
        "negative_prompt": NEGATIVE_PROMPT,
    },
)
IMAGE_TO_VIDEO = replace(
    TEXT_TO_VIDEO,
    components=("dit", "text_encoder", "vae", "image_encoder", "tokenizer"),
    units=(*TEXT_TO_VIDEO.units, units.encode_clip, units.encode_first),
    model_fn=model_fn.predict_from_first_frame_and_clip,
    inputs={
        **TEXT_TO_VIDEO.inputs,
        "input_image": first_frame(),
        "end_image": last_frame(),
    },
    denoiser_config={
        "in_channels": 36,
        "out_channels": 16,
        "image_dim": True,
        "pos_embed_seq_len": False,
    },
    # The last hidden states but one are read.
    unused_parameters={
        "image_encoder": ("encoder.layers.{last}.*", "post_layernorm.*")
    },
    defaults={**TEXT_TO_VIDEO.defaults, "num_inference_steps": 40},
)
FIRST_AND_LAST_TO_VIDEO = replace(
    IMAGE_TO_VIDEO,
    units=(*TEXT_TO_VIDEO.units, units.encode_clip_of_ends, units.encode_first),
    inputs={**IMAGE_TO_VIDEO.inputs, "end_image": last_frame(optional=False)},
    denoiser_config={**IMAGE_TO_VIDEO.denoiser_config, "pos_embed_seq_len": True},
    # generate.py of the published code.
    defaults={**IMAGE_TO_VIDEO.defaults, "num_inference_steps": 50},
)
TEXT_TO_VIDEO_A14B = replace(
    TEXT_TO_VIDEO,
    components=("dit", "dit2", "text_encoder", "vae", "tokenizer"),
    experts=experts(875.0),
    defaults={
        **TEXT_TO_VIDEO.defaults,
        "num_inference_steps": 40,
        "guidance_scale": 4.0,
    },
)
IMAGE_TO_VIDEO_A14B = replace(
    TEXT_TO_VIDEO_A14B,
    units=(*TEXT_TO_VIDEO.units, units.encode_first),
    model_fn=model_fn.predict_from_first_frame,
    inputs=IMAGE_TO_VIDEO.inputs,
    denoiser_config={
        **TEXT_TO_VIDEO.denoiser_config,
        "in_channels": 36,
        "camera_channels": False,
    },
    experts=experts(900.0),
    defaults={**TEXT_TO_VIDEO_A14B.defaults, "guidance_scale": 3.5},
)
TEXT_AND_IMAGE_TO_VIDEO = replace(
    TEXT_TO_VIDEO,
    units=(*TEXT_TO_VIDEO.units, units.encode_first_frame),
    constrain_latents=model_fn.keep_first_frame,
    denoiser_config={"in_channels": 48, "out_channels": 48, "image_dim": False},
    inputs={
        **TEXT_TO_VIDEO.inputs,
        "input_video": Column("video", "video", **video(32, 24.0)),
        # The denoiser can do without it: a dataset's own first frame is given only if
        # the user asks for it.
        "input_image": replace(
            first_frame(32, 24.0, optional=True), least_frames=1 + FRAMES_PER_LATENT
        ),
        "fps": Constant(24.0, check=at_least(1)),
    },
    defaults={
        **TEXT_TO_VIDEO.defaults,
        "height": 704,
        "width": 1280,
        "num_frames": 121,
    },
)
FUN_CONTROL = replace(
    IMAGE_TO_VIDEO,
    units=(
        *TEXT_TO_VIDEO.units,
        control.encode_control,
        control.encode_squeezed_clip,
        units.encode_first,
    ),
    model_fn=control.predict,
    inputs={
        **TEXT_TO_VIDEO.inputs,
        "control_video": another_video("control_video", optional=False),
        "input_image": first_frame(optional=True),
        "end_image": last_frame(),
    },
    denoiser_config={
        **IMAGE_TO_VIDEO.denoiser_config,
        "in_channels": 48,
        "ref_channels": False,
    },
)
FUN_CONTROL_REFERENCE = replace(
    FUN_CONTROL,
    units=(
        *TEXT_TO_VIDEO.units,
        control.encode_control,
        control.encode_reference,
        control.encode_clip_of_reference,
        units.encode_first,
    ),
    model_fn=control.predict_with_reference_and_clip,
    inputs={
        **FUN_CONTROL.inputs,
        "reference_image": Column("reference_image", "image"),
    },
    denoiser_config={**FUN_CONTROL.denoiser_config, "ref_channels": True},
)
FUN_CONTROL_A14B = replace(
    IMAGE_TO_VIDEO_A14B,
    units=(
        *TEXT_TO_VIDEO.units,
        control.encode_control,
        control.encode_reference,
        units.encode_first,
    ),
    model_fn=control.predict_with_reference,
    inputs=FUN_CONTROL_REFERENCE.inputs,
    denoiser_config={
        **TEXT_TO_VIDEO.denoiser_config,
        "in_channels": 52,
        "ref_channels": True,
    },
)
CAMERA = {
    "camera_control_direction": Column(
        "camera_control_direction", check=one_of(*camera.DIRECTIONS), directed=True
    ),
    "camera_control_speed": Column("camera_control_speed", "number", optional=True),
}
FUN_CAMERA = replace(
    IMAGE_TO_VIDEO,
    units=(
        *TEXT_TO_VIDEO.units,
        control.encode_squeezed_clip,
        units.encode_first_frame,
        camera.encode_camera,
    ),
    model_fn=camera.predict,
    inputs={**TEXT_TO_VIDEO.inputs, "input_image": first_frame(), **CAMERA},
    denoiser_config={
        **IMAGE_TO_VIDEO.denoiser_config,
        "in_channels": 32,
        "camera_channels": True,
    },
)
FUN_CAMERA_A14B = replace(
    IMAGE_TO_VIDEO_A14B,
    units=(*TEXT_TO_VIDEO.units, units.encode_first, camera.encode_camera),
    model_fn=camera.predict_from_known,
    inputs={**IMAGE_TO_VIDEO_A14B.inputs, **CAMERA},
    denoiser_config={**IMAGE_TO_VIDEO_A14B.denoiser_config, "camera_channels": True},
)
SPEED_CONTROL = replace(
    TEXT_TO_VIDEO,
    components=("dit", "motion_controller", "text_encoder", "vae", "tokenizer"),
    units=(*TEXT_TO_VIDEO.units, motion.encode_speed),
    model_fn=motion.predict,
    inputs={
        **TEXT_TO_VIDEO.inputs,
        # Ten times as much is embedded as a timestep is, of 0 to 1000.
        "motion_bucket_id": Column(
            "motion_bucket_id", "number", check=between(0, motion.GREATEST_SPEED)
        ),
    },
)
VACE = replace(
    TEXT_TO_VIDEO,
    components=("dit", "vace", "text_encoder", "vae", "tokenizer"),
    units=(
        units.encode_prompt,
        vace.encode_video_after_reference,
        vace.encode_conditions,
    ),
    model_fn=vace.predict,
    decoders=(vace.decode,),
    latent_shape=vace.latent_shape,
    inputs={
        **TEXT_TO_VIDEO.inputs,
        "vace_video": another_video("vace_video"),
        "vace_video_mask": replace(
            another_video("vace_video_mask"), of="vace_video", mode="L"
        ),
        "vace_reference_image": Column("vace_reference_image", "image", optional=True),
    },
)
VACE_A14B = replace(
    VACE,
    components=("dit", "dit2", "vace", "vace2", "text_encoder", "vae", "tokenizer"),
    experts=experts(900.0, "vace"),
    defaults=TEXT_TO_VIDEO_A14B.defaults,
)

PIPELINES = {
    "t2v": TEXT_TO_VIDEO,
    "i2v": IMAGE_TO_VIDEO,
    "flf2v": FIRST_AND_LAST_TO_VIDEO,
    "t2v-a14b": TEXT_TO_VIDEO_A14B,
    "i2v-a14b": IMAGE_TO_VIDEO_A14B,
    "ti2v-5b": TEXT_AND_IMAGE_TO_VIDEO,
    "fun-control": FUN_CONTROL,
    "fun-control-ref": FUN_CONTROL_REFERENCE,
    "fun-control-a14b": FUN_CONTROL_A14B,
    "fun-camera": FUN_CAMERA,
    "fun-camera-a14b": FUN_CAMERA_A14B,
    "speedcontrol": SPEED_CONTROL,
    "vace": VACE,
    "vace-a14b": VACE_A14B,
}
