"""Wan's variants: which units each has, where its inputs come from, and which expert
acts when.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dstrain.graph.inputs import (
    Column,
    Constant,
    InferenceOnly,
    Input,
    Measured,
    at_least,
)
from dstrain.graph.schedule import TRAIN_TIMESTEPS, FlowMatchSchedule
from dstrain.graph.spec import (
    GIVEN_TO_CONSTRAIN_LATENTS,
    GIVEN_TO_DECODER,
    GIVEN_TO_MODEL_FN,
    ExpertSchedule,
    PipelineSpec,
)
from dstrain.graph.unit import FunctionSpec, Unit
from dstrain.models.functional import apply_guidance

from dstrain_wan import model_fn, units

FRAMES_PER_LATENT = 4
SCHEDULE = FlowMatchSchedule(shift=5.0, latents_per_token=model_fn.PATCH**2)

# The last hidden states but one are read; umT5 is used in full.
UNREACHED = MappingProxyType(
    {"image_encoder": ("encoder.layers.{last}.*", "post_layernorm.*")}
)

# sample_neg_prompt of the published configuration, wan/configs/shared_config.py.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True)
class Variant:
    """What one variant has of its own.

    units: their functions, in order. predict: its model_fn. defaults: of inference.
    boundary: the least timestep of the noisier of two experts, divided by 1000; 0 for
    one denoiser alone. with_image: whether the video's first frame is an input, too.
    components: beside those of every variant. multiple: of sides in pixels. fps: frames
    per second.
    """

    units: tuple[Callable[..., Any], ...]
    predict: Callable[..., Any]
    defaults: Mapping[str, Any]
    boundary: float = 0.0
    with_image: bool = True
    components: tuple[str, ...] = ()
    constrain_latents: FunctionSpec | None = None
    multiple: int = 16
    fps: float = 16.0


def _inputs(variant: Variant) -> Mapping[str, Input]:
    """The table of inputs: the video's frames, and the first of them as a picture."""
    loaded: dict[str, Any] = {
        "multiple": variant.multiple,
        "frame_multiple": FRAMES_PER_LATENT,
        "fps": variant.fps,
    }
    # Where a denoiser can do without it, a data set's own first frame is given only if
    # the user asks for it.
    constrained = variant.constrain_latents is not None
    image = {
        "input_image": Column(
            "video", "image", frame="first", optional=constrained, **loaded
        )
    }
    image = image if variant.with_image else {}
    return MappingProxyType(
        {
            "prompt": Column("prompt"),
            "negative_prompt": InferenceOnly(),
            "input_video": Column("video", "video", **loaded),
            **image,
            "height": Measured("input_video", "height"),
            "width": Measured("input_video", "width"),
            "num_frames": Measured("input_video", "frames"),
            "fps": Constant(variant.fps, check=at_least(1)),
        }
    )


def _defaults(
    steps: int, scale: float, height: int = 480, width: int = 832, num_frames: int = 81
) -> Mapping[str, Any]:
    """Default arguments of inference, those of the published configurations
    (wan/configs).
    """
    return MappingProxyType(
        {
            "height": height,
            "width": width,
            "num_frames": num_frames,
            "num_inference_steps": steps,
            "guidance_scale": scale,
            "negative_prompt": NEGATIVE_PROMPT,
        }
    )


TEXT = (units.encode_prompt, units.encode_video)

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "t2v": Variant(TEXT, model_fn.predict, _defaults(50, 5.0), with_image=False),
        "i2v": Variant(
            (*TEXT, units.encode_clip, units.encode_first),
            model_fn.predict_seen,
            _defaults(40, 5.0),
            components=("image_encoder",),
        ),
        "t2v-a14b": Variant(
            TEXT,
            model_fn.predict,
            _defaults(40, 4.0),
            boundary=0.875,
            with_image=False,
        ),
        "i2v-a14b": Variant(
            (*TEXT, units.encode_first),
            model_fn.predict_known,
            _defaults(40, 3.5),
            boundary=0.9,
        ),
        "ti2v-5b": Variant(
            (*TEXT, units.encode_first_frame),
            model_fn.predict,
            _defaults(50, 5.0, 704, 1280, 121),
            constrain_latents=FunctionSpec.of(
                model_fn.hold_first_frame, given=GIVEN_TO_CONSTRAIN_LATENTS
            ),
            multiple=32,
            fps=24.0,
        ),
    }
)


def build(variant: str) -> PipelineSpec:
    """Wire one of the variants that the record names."""
    row = VARIANTS[variant]
    experts = _expert(row.boundary) if row.boundary else None
    denoisers = experts.components if experts else ("dit",)
    return PipelineSpec(
        family="wan",
        variant=variant,
        components=(*denoisers, "text_encoder", "vae", *row.components, "tokenizer"),
        units=tuple(Unit(function) for function in row.units),
        model_fn=FunctionSpec.of(row.predict, given=GIVEN_TO_MODEL_FN),
        decoders=(Unit(units.decode, given=GIVEN_TO_DECODER),),
        inputs=_inputs(row),
        schedule=SCHEDULE,
        latent_shape=FunctionSpec.of(model_fn.latent_shape),
        apply_guidance=apply_guidance,
        constrain_latents=row.constrain_latents,
        experts=experts,
        cfg_inputs=MappingProxyType({"prompt": "negative_prompt"}),
        padded=MappingProxyType({"prompt_emb": 1}),
        unused_parameters=UNREACHED,
        defaults=row.defaults,
    )


def _expert(boundary: float) -> ExpertSchedule:
    """The two experts of Wan 2.2 A14B: `dit` from the boundary up to pure noise, `dit2`
    below it.
    """
    least = boundary * TRAIN_TIMESTEPS
    return ExpertSchedule(
        "dit",
        MappingProxyType(
            {"dit": (least, float(TRAIN_TIMESTEPS)), "dit2": (0.0, least)}
        ),
    )


def variants_for(configuration: Mapping[str, Any]) -> tuple[str, ...]:
    """The variants that a transformer of this configuration can be, told by its
    channels and its image embedding.
    """
    channels = configuration.get("in_channels", 16)
    if channels == 16:
        return ("t2v", "t2v-a14b")
    if channels == 36:
        return ("i2v",) if configuration.get("image_dim") else ("i2v-a14b",)
    return ("ti2v-5b",) if channels == 48 else ()
