"""Qwen-Image on paper: rows that are not built yet, as signatures without bodies."""

from typing import Any, TypedDict

from dstrain.graph.inputs import Column, Given, Size, Source
from dstrain.graph.schedule import FlowMatchSchedule
from dstrain.graph.spec import (
    GIVEN_TO_DECODER,
    GIVEN_TO_HOLD,
    GIVEN_TO_MODEL_FN,
    Wiring,
)
from dstrain.graph.unit import Signature, Unit
from PIL.Image import Image
from torch import Tensor


class Latents(TypedDict):
    input_latents: Tensor  # (1, 16, frames, height/8, width/8)


class Prompt(TypedDict):
    prompt_emb: Tensor  # (1, tokens, channels)
    prompt_mask: Tensor  # (1, tokens), bool


class ControlPicture(TypedDict):
    blockwise_picture: Image


class ControlMask(TypedDict):
    blockwise_mask: Image


class ControlLatents(TypedDict):
    blockwise_latents: list[Tensor]  # one per ControlNet


class LayerInput(TypedDict):
    layer_latents: Tensor  # (1, 16, 1, height/8, width/8)


class ContextPicture(TypedDict):
    context_picture: Image


class ContextLatents(TypedDict):
    context_latents: Tensor


class Entities(TypedDict):
    entities: list[Prompt]


class EntityMasks(TypedDict):
    entity_masks: Tensor  # (1, entities, height/8, width/8)


class SideEntities(TypedDict):
    side_entities: list[Prompt]  # empty on a side that has none


class InpaintWeight(TypedDict):
    inpaint_weight: (
        Tensor  # (1, 1, 1, height/8, width/8), 1 where the picture is made anew
    )


class Picture(TypedDict):
    picture: Image


class Layers(TypedDict):
    layers: list[Image]


# Units that most rows share.


def encode_prompt(prompt: str, *, text_encoder: Any, tokenizer: Any) -> Prompt: ...


def encode_picture(input_image: Image, *, vae: Any, dtype: Any) -> Latents: ...


def decode_picture(latents: Tensor, *, vae: Any) -> Picture: ...


# Blockwise ControlNet.


def resize_control(
    blockwise_controlnet_image: Image, height: int, width: int
) -> ControlPicture: ...


def resize_control_mask(
    blockwise_controlnet_inpaint_mask: Image, height: int, width: int
) -> ControlMask: ...


def encode_control(blockwise_picture: Image, *, vae: Any) -> ControlLatents: ...


def encode_control_inpaint(
    blockwise_picture: Image, blockwise_mask: Image, *, vae: Any
) -> ControlLatents: ...


# Layered, and in-context control.


def encode_layers(
    layer_images: list[Image], layer_num: int, *, vae: Any
) -> Latents: ...


def encode_layer_input(layer_input_image: Image, *, vae: Any) -> LayerInput: ...


def resize_context(context_image: Image, height: int, width: int) -> ContextPicture: ...


def encode_context(context_picture: Image, *, vae: Any) -> ContextLatents: ...


def decode_layers(latents: Tensor, *, vae: Any) -> Layers: ...


# EliGen.


def encode_entities(
    eligen_entity_prompts: list[str], *, text_encoder: Any, tokenizer: Any
) -> Entities: ...


def scale_entity_masks(
    eligen_entity_masks: list[Image], height: int, width: int
) -> EntityMasks: ...


def choose_entities(
    entities: list[Prompt], eligen_enable_on_negative: bool = False, *, side: str
) -> SideEntities: ...


# Inpaint.


def scale_inpaint_mask(
    inpaint_mask: Image, height: int, width: int
) -> InpaintWeight: ...


def hold_picture(
    latents: Tensor,
    timestep: Tensor,
    noise: Tensor,
    input_latents: Tensor,
    inpaint_weight: Tensor,
) -> Any: ...


# The denoiser, once per set of conditions. What a row cannot do without is required:
# its absence is refused.


def predict(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    *,
    dit: Any,
) -> Tensor: ...


def predict_controlled(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    blockwise_latents: list[Tensor],
    blockwise_controlnet_scale: list[float] | None = None,
    *,
    dit: Any,
    blockwise_controlnet: Any,
) -> Tensor: ...


def predict_layered(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    layer_latents: Tensor,
    *,
    dit: Any,
) -> Tensor: ...


def predict_layered_control(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    layer_latents: Tensor,
    context_latents: Tensor,
    *,
    dit: Any,
) -> Tensor: ...


def predict_entities(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    side_entities: list[Prompt],
    entity_masks: Tensor,
    *,
    dit: Any,
) -> Tensor: ...


def predict_in_context(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    context_latents: Tensor,
    *,
    dit: Any,
) -> Tensor: ...


def latent_shape(height: int, width: int) -> tuple[int, ...]: ...


def latent_shape_layered(
    height: int, width: int, layer_num: int
) -> tuple[int, ...]: ...


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor: ...


TEXT: dict[str, Source] = {
    "prompt": Column("prompt"),
    "negative_prompt": Column("negative_prompt"),
}
PICTURE: dict[str, Source] = {
    "input_image": Column("image", "picture", multiple=16),
    "height": Size("input_image", "height"),
    "width": Size("input_image", "width"),
}
LAYERS: dict[str, Source] = {
    "layer_images": Column("image", "pictures", mode="RGBA", multiple=16),
    "layer_input_image": Column(
        "layer_input_image", "picture", mode="RGBA", multiple=16
    ),
    "layer_num": Column("layer_num", "integer"),
    "height": Size("layer_input_image", "height"),
    "width": Size("layer_input_image", "width"),
}
CONTROL: dict[str, Source] = {
    "blockwise_controlnet_image": Column("blockwise_controlnet_image", "picture"),
    "blockwise_controlnet_scale": Given(),
}
SCHEDULE = FlowMatchSchedule(
    max_mu=0.9, max_tokens=8192, training_mu=0.8, shift_terminal=0.02
)


def model_fn(function: Any) -> Signature:
    return Signature.of(function, GIVEN_TO_MODEL_FN)


def wiring(
    variant: str,
    units: list[Any],
    denoise: Any,
    inputs: dict[str, Source],
    components: tuple[str, ...] = ("dit", "text_encoder", "vae", "tokenizer"),
    decoder: Any = decode_picture,
    shape: Any = latent_shape,
    hold: Signature | None = None,
) -> Wiring:
    """A variant of the family: what is the same in all of them is said here."""
    return Wiring(
        family="qwen_image",
        variant=variant,
        components=components,
        units=tuple(Unit.of(unit) for unit in units),
        model_fn=model_fn(denoise),
        decoders=(Unit.of(decoder, given=GIVEN_TO_DECODER),),
        inputs=TEXT | inputs,
        schedule=SCHEDULE,
        latent_shape=Signature.of(shape),
        guide=guide,
        hold=hold,
        per_side={"prompt": "negative_prompt"},
        padded={"prompt_emb": 1, "prompt_mask": 1},
        unreached={
            "dit": (
                "transformer_blocks.{last}.attn.to_add_out",
                "transformer_blocks.{last}.txt_mlp",
            )
        },
    )


CONTROL_COMPONENTS = ("dit", "text_encoder", "vae", "tokenizer", "blockwise_controlnet")

WIRINGS: tuple[Wiring, ...] = (
    wiring(
        "blockwise-controlnet",
        [encode_prompt, resize_control, encode_control, encode_picture],
        predict_controlled,
        PICTURE | CONTROL,
        CONTROL_COMPONENTS,
    ),
    wiring(
        "blockwise-controlnet-inpaint",
        [
            encode_prompt,
            resize_control,
            resize_control_mask,
            encode_control_inpaint,
            encode_picture,
        ],
        predict_controlled,
        PICTURE
        | CONTROL
        | {
            "blockwise_controlnet_inpaint_mask": Column(
                "blockwise_controlnet_inpaint_mask", "picture", mode="L"
            )
        },
        CONTROL_COMPONENTS,
    ),
    wiring(
        "layered",
        [encode_prompt, encode_layer_input, encode_layers],
        predict_layered,
        LAYERS,
        decoder=decode_layers,
        shape=latent_shape_layered,
    ),
    wiring(
        "layered-control",
        [
            encode_prompt,
            encode_layer_input,
            resize_context,
            encode_context,
            encode_layers,
        ],
        predict_layered_control,
        LAYERS | {"context_image": Column("context_image", "picture", mode="RGBA")},
        decoder=decode_layers,
        shape=latent_shape_layered,
    ),
    wiring(
        "eligen",
        [
            encode_prompt,
            encode_entities,
            scale_entity_masks,
            choose_entities,
            encode_picture,
        ],
        predict_entities,
        PICTURE
        | {
            "eligen_entity_prompts": Column("eligen_entity_prompts", "texts"),
            "eligen_entity_masks": Column("eligen_entity_masks", "pictures", mode="L"),
            "eligen_enable_on_negative": Given(),
        },
    ),
    wiring(
        "in-context-control",
        [encode_prompt, resize_context, encode_context, encode_picture],
        predict_in_context,
        PICTURE | {"context_image": Column("context_image", "picture")},
    ),
    wiring(
        "inpaint",
        [encode_prompt, encode_picture, scale_inpaint_mask],
        predict,
        PICTURE | {"inpaint_mask": Given()},
        hold=Signature.of(hold_picture, (*GIVEN_TO_HOLD, "noise")),
    ),
)
