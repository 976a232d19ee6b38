"""Wan on paper: rows that are not built yet, as signatures without bodies."""

from typing import Any, TypedDict

from dstrain.graph.inputs import Column, Given, Size, Source
from dstrain.graph.schedule import FlowMatchSchedule
from dstrain.graph.spec import GIVEN_TO_DECODER, GIVEN_TO_MODEL_FN, Wiring
from dstrain.graph.unit import Signature, Unit
from dstrain.graph.values import Frames
from PIL.Image import Image
from torch import Tensor


class Latents(TypedDict):
    input_latents: Tensor  # (1, channels, latent frames, height/8, width/8)


class Prompt(TypedDict):
    prompt_emb: Tensor  # (1, tokens, channels) of true length; model_fn fills up to 512 with zeros


class Clip(TypedDict):
    clip_feature: (
        Tensor  # (1, 257, channels), or twice as many tokens with a last frame
    )


class Y(TypedDict):
    y: Tensor  # (1, 4 + 16, latent frames, height/8, width/8): mask, VAE of the known frames


class ControlLatents(TypedDict):
    control_latents: Tensor


class ReferenceLatents(TypedDict):
    reference_latents: Tensor  # (1, 16, 1, height/8, width/8)


class CameraRays(TypedDict):
    camera_rays: Tensor  # (1, 24, latent frames, height, width), Pluecker coordinates


class VaceContext(TypedDict):
    vace_context: Tensor  # (1, 96, latent frames, height/8, width/8)


class MotionBucket(TypedDict):
    motion_bucket: Tensor  # (1,)


class Video(TypedDict):
    video: Frames


def encode_prompt(prompt: str, *, text_encoder: Any, tokenizer: Any) -> Prompt: ...


def encode_video(input_video: Frames, *, vae: Any) -> Latents: ...


def decode_video(latents: Tensor, *, vae: Any) -> Video: ...


# FLF2V, Fun-InP, camera: known frames.


def encode_clip(input_image: Image, *, image_encoder: Any) -> Clip: ...


def encode_clip_ends(
    input_image: Image, end_image: Image, *, image_encoder: Any
) -> Clip: ...


def encode_first(
    input_image: Image, num_frames: int, height: int, width: int, *, vae: Any
) -> Y: ...


def encode_ends(
    input_image: Image,
    end_image: Image,
    num_frames: int,
    height: int,
    width: int,
    *,
    vae: Any,
) -> Y: ...


# Fun-Control and its camera.


def encode_control(control_video: Frames, *, vae: Any) -> ControlLatents: ...


def encode_reference(
    reference_image: Image, height: int, width: int, *, vae: Any
) -> ReferenceLatents: ...


def encode_clip_control(
    input_image: Image | None = None,
    reference_image: Image | None = None,
    *,
    image_encoder: Any,
) -> Clip: ...


def encode_first_control(
    num_frames: int,
    height: int,
    width: int,
    input_image: Image | None = None,
    *,
    vae: Any,
) -> Y: ...


def trace_camera(
    camera_control_direction: str,
    camera_control_speed: float,
    num_frames: int,
    height: int,
    width: int,
) -> CameraRays: ...


# VACE: the reference is one more latent frame in front of the video.


def encode_vace_reference(
    vace_reference_image: Image, height: int, width: int, *, vae: Any
) -> ReferenceLatents: ...


def encode_vace(
    vace_video: Frames,
    reference_latents: Tensor | None = None,
    vace_video_mask: Frames | None = None,
    *,
    vae: Any,
) -> VaceContext: ...


def encode_video_after(
    input_video: Frames, reference_latents: Tensor | None = None, *, vae: Any
) -> Latents: ...


def decode_video_after(
    latents: Tensor, reference_latents: Tensor | None = None, *, vae: Any
) -> Video: ...


# speedcontrol.


def count_motion(motion_bucket_id: int) -> MotionBucket: ...


# The denoiser, once per set of conditions.


def predict_seen(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    y: Tensor,
    clip_feature: Tensor,
    *,
    dit: Any,
) -> Tensor: ...


def predict_controlled(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    control_latents: Tensor,
    y: Tensor,
    clip_feature: Tensor,
    reference_latents: Tensor | None = None,
    *,
    dit: Any,
) -> Tensor: ...


def predict_camera(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    camera_rays: Tensor,
    y: Tensor,
    clip_feature: Tensor,
    *,
    dit: Any,
) -> Tensor: ...


def predict_vace(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    vace_context: Tensor,
    vace_scale: float = 1.0,
    *,
    dit: Any,
    vace: Any,
) -> Tensor: ...


def predict_speed(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    motion_bucket: Tensor,
    *,
    dit: Any,
    motion_controller: Any,
) -> Tensor: ...


def latent_shape(height: int, width: int, num_frames: int) -> tuple[int, ...]: ...


def latent_shape_vace(
    height: int, width: int, num_frames: int, vace_reference_image: Image | None = None
) -> tuple[int, ...]: ...


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor: ...


INPUTS: dict[str, Source] = {
    "prompt": Column("prompt"),
    "negative_prompt": Column("negative_prompt"),
    "input_video": Column("video", "frames", multiple=16, frames=4),
    "height": Size("input_video", "height"),
    "width": Size("input_video", "width"),
    "num_frames": Size("input_video", "frames"),
}
FIRST: dict[str, Source] = {
    "input_image": Column("video", "picture", pick="first", multiple=16, frames=4)
}
ENDS: dict[str, Source] = FIRST | {
    "end_image": Column("video", "picture", pick="last", multiple=16, frames=4)
}
BASE = [encode_prompt, encode_video]
WITH_CLIP = ("image_encoder",)


def wiring(
    variant: str,
    units: list[Any],
    denoise: Any,
    inputs: dict[str, Source],
    components: tuple[str, ...] = (),
    shape: Any = latent_shape,
    decoder: Any = decode_video,
) -> Wiring:
    """A variant of the family: what is the same in all of them is said here."""
    return Wiring(
        family="wan",
        variant=variant,
        components=("dit", "text_encoder", "tokenizer", "vae", *components),
        units=tuple(Unit.of(unit) for unit in units),
        model_fn=Signature.of(denoise, GIVEN_TO_MODEL_FN),
        decoders=(Unit.of(decoder, given=GIVEN_TO_DECODER),),
        inputs=INPUTS | inputs,
        schedule=FlowMatchSchedule(shift=5.0),
        latent_shape=Signature.of(shape),
        guide=guide,
        per_side={"prompt": "negative_prompt"},
        padded={"prompt_emb": 1},
    )


WIRINGS: tuple[Wiring, ...] = (
    wiring(
        "flf2v-2.1",
        [*BASE, encode_clip_ends, encode_ends],
        predict_seen,
        ENDS,
        WITH_CLIP,
    ),
    wiring("fun-inp", [*BASE, encode_clip, encode_ends], predict_seen, ENDS, WITH_CLIP),
    wiring(
        "fun-control",
        [
            *BASE,
            encode_control,
            encode_reference,
            encode_clip_control,
            encode_first_control,
        ],
        predict_controlled,
        {
            "control_video": Column("control_video", "frames", multiple=16, frames=4),
            "reference_image": Column("reference_image", "picture"),
            "input_image": Given(),
        },
        WITH_CLIP,
    ),
    wiring(
        "fun-control-camera",
        [*BASE, trace_camera, encode_clip, encode_first],
        predict_camera,
        FIRST
        | {
            "camera_control_direction": Column("camera_control_direction"),
            "camera_control_speed": Column("camera_control_speed", "number"),
        },
        WITH_CLIP,
    ),
    wiring(
        "vace",
        [encode_prompt, encode_vace_reference, encode_vace, encode_video_after],
        predict_vace,
        {
            "vace_video": Column("vace_video", "frames", multiple=16, frames=4),
            "vace_video_mask": Column(
                "vace_video_mask", "frames", multiple=16, frames=4
            ),
            "vace_reference_image": Column("vace_reference_image", "picture"),
            "vace_scale": Given(),
        },
        ("vace",),
        shape=latent_shape_vace,
        decoder=decode_video_after,
    ),
    wiring(
        "speedcontrol",
        [*BASE, count_motion],
        predict_speed,
        {"motion_bucket_id": Column("motion_bucket_id", "integer")},
        ("motion_controller",),
    ),
)
