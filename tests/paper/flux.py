"""FLUX on paper: rows that are not built yet, as signatures without bodies."""

from typing import Any, TypedDict

from dstrain.graph.inputs import Column, Given, Size, Source
from dstrain.graph.schedule import FlowMatchSchedule
from dstrain.graph.spec import GIVEN_TO_DECODER, GIVEN_TO_MODEL_FN, Wiring
from dstrain.graph.unit import Signature, Unit
from PIL.Image import Image
from torch import Tensor


class Latents(TypedDict):
    input_latents: Tensor  # (1, 16, height/8, width/8)


class Pooled(TypedDict):
    pooled_emb: Tensor  # (1, channels), CLIP


class Prompt(TypedDict):
    prompt_emb: Tensor  # (1, 512, channels), T5


class Text(TypedDict):
    text_emb: Tensor  # (1, 512, channels), T5, before pictures are joined to it


class Fill(TypedDict):
    fill_picture: Image
    fill_mask: Image


class FillLatents(TypedDict):
    fill_latents: Tensor  # (1, 16 + 64, height/8, width/8): masked picture, mask


class Control(TypedDict):
    latents: Tensor
    mode: Tensor | None  # (1,), which of a union's kinds


class Controls(TypedDict):
    controls: list[Control]  # one per ControlNet


class AdapterFeatures(TypedDict):
    ipadapter_features: Tensor  # (1, pictures, channels)


class AdapterTokens(TypedDict):
    ipadapter_tokens: Tensor  # (1, tokens, channels)


class ReduxFeatures(TypedDict):
    redux_features: Tensor


class ReduxEmb(TypedDict):
    redux_emb: Tensor  # (1, 729, channels)


class Entity(TypedDict):
    prompt_emb: Tensor


class Entities(TypedDict):
    entities: list[Entity]


class EntityMasks(TypedDict):
    entity_masks: Tensor  # (1, entities, height/8, width/8)


class SideEntities(TypedDict):
    side_entities: list[Entity]


class Picture(TypedDict):
    picture: Image


def encode_clip(prompt: str, *, text_encoder_1: Any, tokenizer_1: Any) -> Pooled: ...


def encode_prompt(prompt: str, *, text_encoder_2: Any, tokenizer_2: Any) -> Prompt: ...


def encode_picture(input_image: Image, *, vae: Any) -> Latents: ...


def decode_picture(latents: Tensor, *, vae: Any) -> Picture: ...


# Fill.


def resize_fill(
    flux_fill_image: Image, flux_fill_mask: Image, height: int, width: int
) -> Fill: ...


def encode_fill(fill_picture: Image, fill_mask: Image, *, vae: Any) -> FillLatents: ...


# ControlNets.


def encode_control(
    controlnet_image: list[Image], height: int, width: int, *, vae: Any
) -> Controls: ...


def encode_control_union(
    controlnet_image: list[Image],
    controlnet_processor_id: list[str],
    height: int,
    width: int,
    *,
    vae: Any,
) -> Controls: ...


def encode_control_inpaint(
    controlnet_image: list[Image],
    controlnet_inpaint_mask: list[Image],
    height: int,
    width: int,
    *,
    vae: Any,
) -> Controls: ...


# IP-Adapter.


def embed_adapter_pictures(
    ipadapter_images: list[Image], *, ipadapter_image_encoder: Any
) -> AdapterFeatures: ...


def project_adapter_features(
    ipadapter_features: Tensor, *, ipadapter: Any
) -> AdapterTokens: ...


# Redux: a join extends the text.


def encode_text(prompt: str, *, text_encoder_2: Any, tokenizer_2: Any) -> Text: ...


def embed_redux_picture(
    flux_redux_image: Image, *, redux_image_encoder: Any
) -> ReduxFeatures: ...


def project_redux_features(redux_features: Tensor, *, redux: Any) -> ReduxEmb: ...


def join_prompt(text_emb: Tensor, redux_emb: Tensor | None = None) -> Prompt: ...


# EliGen.


def encode_entities(
    eligen_entity_prompts: list[str], *, text_encoder_2: Any, tokenizer_2: Any
) -> Entities: ...


def scale_entity_masks(
    eligen_entity_masks: list[Image], height: int, width: int
) -> EntityMasks: ...


def choose_entities(
    entities: list[Entity], eligen_enable_on_negative: bool = False, *, side: str
) -> SideEntities: ...


# The denoiser. Image ids follow from noisy's shape; embedded guidance is 1 in training,
# where nothing gives it.


def predict(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
) -> Tensor: ...


def predict_fill(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    fill_latents: Tensor,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
) -> Tensor: ...


def predict_controlled(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    controls: list[Control],
    controlnet_scale: list[float] | None = None,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
    controlnet: Any,
) -> Tensor: ...


def predict_adapted(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    ipadapter_tokens: Tensor,
    ipadapter_scale: float = 1.0,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
    ipadapter: Any,
) -> Tensor: ...


def predict_entities(
    noisy: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    side_entities: list[Entity],
    entity_masks: Tensor,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
) -> Tensor: ...


def latent_shape(height: int, width: int) -> tuple[int, ...]: ...


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor: ...


INPUTS: dict[str, Source] = {
    "prompt": Column("prompt"),
    "negative_prompt": Column("negative_prompt"),
    "input_image": Column("image", "picture", multiple=16),
    "height": Size("input_image", "height"),
    "width": Size("input_image", "width"),
    "embedded_guidance": Given(),
}
CONTROL: dict[str, Source] = {
    "controlnet_image": Column("controlnet_image", "pictures"),
    "controlnet_scale": Given(),
}
TEXT_COMPONENTS = (
    "dit",
    "text_encoder_1",
    "text_encoder_2",
    "vae",
    "tokenizer_1",
    "tokenizer_2",
)
BASE = [encode_clip, encode_prompt, encode_picture]


def wiring(
    variant: str,
    units: list[Any],
    denoise: Any = predict,
    inputs: dict[str, Source] | None = None,
    components: tuple[str, ...] = (),
) -> Wiring:
    """A variant of the family: what is the same in all of them is said here."""
    return Wiring(
        family="flux",
        variant=variant,
        components=TEXT_COMPONENTS + components,
        units=tuple(Unit.of(unit) for unit in units),
        model_fn=Signature.of(denoise, GIVEN_TO_MODEL_FN),
        decoders=(Unit.of(decode_picture, given=GIVEN_TO_DECODER),),
        inputs=INPUTS | (inputs or {}),
        schedule=FlowMatchSchedule(shift=3.0, sigma_min=0.003 / 1.002),
        latent_shape=Signature.of(latent_shape),
        guide=guide,
        per_side={"prompt": "negative_prompt"},
    )


WIRINGS: tuple[Wiring, ...] = (
    wiring(
        "fill",
        [*BASE, resize_fill, encode_fill],
        predict_fill,
        {
            "flux_fill_image": Column("flux_fill_image", "picture"),
            "flux_fill_mask": Column("flux_fill_mask", "picture", mode="L"),
        },
    ),
    wiring(
        "controlnet-union",
        [*BASE, encode_control_union],
        predict_controlled,
        CONTROL
        | {"controlnet_processor_id": Column("controlnet_processor_id", "texts")},
        ("controlnet",),
    ),
    wiring(
        "controlnet-upscaler",
        [*BASE, encode_control],
        predict_controlled,
        CONTROL,
        ("controlnet",),
    ),
    wiring(
        "controlnet-inpaint",
        [*BASE, encode_control_inpaint],
        predict_controlled,
        CONTROL
        | {
            "controlnet_inpaint_mask": Column(
                "controlnet_inpaint_mask", "pictures", mode="L"
            )
        },
        ("controlnet",),
    ),
    wiring(
        "ip-adapter",
        [*BASE, embed_adapter_pictures, project_adapter_features],
        predict_adapted,
        {
            "ipadapter_images": Column("ipadapter_images", "pictures"),
            "ipadapter_scale": Given(),
        },
        ("ipadapter", "ipadapter_image_encoder"),
    ),
    wiring(
        "redux",
        [
            encode_clip,
            encode_text,
            embed_redux_picture,
            project_redux_features,
            join_prompt,
            encode_picture,
        ],
        predict,
        {"flux_redux_image": Column("flux_redux_image", "picture")},
        ("redux", "redux_image_encoder"),
    ),
    wiring(
        "eligen",
        [*BASE, encode_entities, scale_entity_masks, choose_entities],
        predict_entities,
        {
            "eligen_entity_prompts": Column("eligen_entity_prompts", "texts"),
            "eligen_entity_masks": Column("eligen_entity_masks", "pictures", mode="L"),
            "eligen_enable_on_negative": Given(),
        },
    ),
)
