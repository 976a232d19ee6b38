"""Qwen-Image keeps the contract of a family; diffusers' pipelines are what its variants
must equal.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageInpaintPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.transformers import transformer_qwenimage
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_inpaint,
    pipeline_qwenimage_layered,
)
from dstrain import Pipeline
from dstrain.testing import Conformance
from dstrain_qwen_image.model_fn import DOWNSCALE, pack, unpack
from PIL import Image
from torch import Tensor, nn

from tests.support.published_processor import PublishedProcessor
from tests.support.published_steps import add_to, encode_the_mode

RENAMED = {
    "guidance_scale": "true_cfg_scale",
    "edit_image": "image",
    "input_image": "image",
}
OURS = ("edit_pixels", "edit_text_pixels")
PUBLISHED_PIXELS = {1024 * 1024: "edit_pixels", 384 * 384: "edit_text_pixels"}


def by_diffusers(
    kind: type[Any],
    pipe: Pipeline,
    folder: Path,
    arguments: Mapping[str, Any],
    call: Mapping[str, Any] | None = None,
    **parts: Any,
) -> tuple[list[Tensor], Any]:
    """The latents after each step of diffusers' pipeline on our components, and its
    image.
    """
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    tokenizer = (
        pipe.components.get("tokenizer") or pipe.components["processor"].tokenizer
    )
    shared = {
        "tokenizer": tokenizer,
        **{name: pipe.components[name] for name in ("text_encoder", "vae")},
    }
    published = kind(
        scheduler=scheduler, transformer=pipe.components["dit"], **shared, **parts
    )
    published.set_progress_bar_config(disable=True)
    height, width = (arguments[side] // DOWNSCALE for side in ("height", "width"))
    passed: list[Tensor] = []
    at_step_end = add_to(passed, partial(unpack, height=height, width=width))
    given = {
        RENAMED.get(name, name): value
        for name, value in arguments.items()
        if name not in OURS
    }
    if call is None:
        call = {"latents": pack(arguments["latents"])}
    given = {**given, **call}
    image = published(**given, callback_on_step_end=at_step_end).images[0]
    return passed, image


def edit(
    pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
) -> tuple[list[Tensor], Any]:
    """diffusers' pipeline, made to resize images to our sizes and to pass
    `mm_token_type_ids`, as it should.
    """
    encoder = pipe.components["text_encoder"]
    forward, image = encoder.forward, encoder.config.image_token_id
    kind = (
        QwenImageEditPipeline
        if pipe.spec.variant == "edit"
        else QwenImageEditPlusPipeline
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            exact = module.calculate_dimensions
            patch.setattr(
                module,
                "calculate_dimensions",
                lambda area, ratio, exact=exact: exact(
                    arguments[PUBLISHED_PIXELS[area]], ratio
                ),
            )
        patch.setattr(
            encoder,
            "forward",
            lambda **given: forward(
                **given, mm_token_type_ids=(given["input_ids"] == image).int()
            ),
        )
        return by_diffusers(
            kind,
            pipe,
            folder,
            arguments,
            processor=PublishedProcessor(pipe.components["processor"]),
        )


def controlled(
    pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
) -> tuple[list[Tensor], Any]:
    """diffusers' pipeline, to whose tokens hooks add what a blockwise ControlNet computes
    by its equations.
    """
    weights = pipe.components["blockwise_controlnet"].state_dict()
    given = dict(arguments)
    image = given.pop("blockwise_controlnet_image")
    mask = given.pop("blockwise_controlnet_inpaint_mask", None)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
    if mask is not None:
        masked = torch.from_numpy(np.array(mask)).float()
        pixels = torch.where(masked > 127.5, -1.0, pixels)
    latents = encode(pipe, pixels)
    if mask is not None:
        kept = 1 - F.interpolate(masked[None, None] / 255, latents.shape[-2:])
        latents = torch.cat([latents, kept[:, :, None]], dim=1)

    def linear(tokens: Tensor, name: str) -> Tensor:
        return tokens @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normalized(tokens: Tensor, name: str) -> Tensor:
        size = (tokens.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return tokens / size * weights[f"{name}.weight"]

    control = linear(pack(latents), "img_in")

    def add(index: int, block: nn.Module, _: Any, made: tuple[Tensor, Tensor]) -> Any:
        own = f"controlnet_blocks.{index}"
        text, tokens = made
        both = normalized(tokens, f"{own}.x_rms") + normalized(control, f"{own}.y_rms")
        hidden = F.gelu(linear(both, f"{own}.input_proj"))
        return text, tokens + linear(hidden, f"{own}.output_proj")

    blocks = pipe.components["dit"].transformer_blocks
    hooks = [
        block.register_forward_hook(partial(add, index))
        for index, block in enumerate(blocks)
    ]
    try:
        return by_diffusers(QwenImagePipeline, pipe, folder, given)
    finally:
        for hook in hooks:
            hook.remove()


def in_context(
    pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
) -> tuple[list[Tensor], Any]:
    """diffusers' pipeline, whose transformer gets the tokens of one more image."""
    given = dict(arguments)
    context = given.pop("context_image")
    with pytest.MonkeyPatch.context() as patch:
        add_context(patch, pipe, context, 0)
        return by_diffusers(QwenImagePipeline, pipe, folder, given)


def add_context(
    patch: pytest.MonkeyPatch, pipe: Pipeline, image: Image.Image, place: int
) -> None:
    """Give the transformer the tokens of an image before the last `place` ones."""
    context = pack(encode(pipe, VaeImageProcessor().preprocess(image)))
    dit = pipe.components["dit"]
    forward = dit.forward

    def with_context(hidden_states: Tensor, img_shapes: Any, **named: Any) -> Any:
        end = hidden_states.shape[1] - place * context.shape[1]
        parts = [hidden_states[:, :end], context, hidden_states[:, end:]]
        grids = []
        for one in img_shapes:
            images = len(one) - place
            grids.append([*one[:images], one[0], *one[images:]])
        (made,) = forward(
            hidden_states=torch.cat(parts, dim=1), img_shapes=grids, **named
        )
        return (made[:, :end],)

    patch.setattr(dit, "forward", with_context)


def entities(
    pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
) -> tuple[list[Tensor], Any]:
    """diffusers' pipeline, whose transformer gets the texts of entities before the prompt,
    in the positions that each has alone, and a mask made token by token.
    """
    given = dict(arguments)
    prompts, masks = (
        given.pop(f"eligen_entity_{name}") for name in ("prompts", "masks")
    )
    parts = {name: pipe.components[name] for name in ("text_encoder", "tokenizer")}
    encoder = QwenImagePipeline(scheduler=None, transformer=None, vae=None, **parts)
    texts = [encoder.encode_prompt([one])[0] for one in (*prompts, given["prompt"])]
    regions = [
        F.max_pool2d(
            torch.from_numpy(np.array(mask))[4::8, 4::8].gt(127).float()[None], 2
        )
        for mask in masks
    ]
    # The owner of each text token, and the texts of each image token.
    owners = [number for number, text in enumerate(texts) for _ in range(text.shape[1])]
    inside = [{len(masks)} for _ in range(regions[0].numel())]
    for number, region in enumerate(regions):
        for token in region.flatten().nonzero().flatten().tolist():
            inside[token].add(number)
    tokens = [{owner} for owner in owners] + inside
    allowed = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    for row, ours in enumerate(tokens):
        for column, theirs in enumerate(tokens):
            if row < len(owners) or column < len(owners):
                allowed[row, column] = bool(ours & theirs)
    dit = pipe.components["dit"]
    forward, embed = dit.forward, dit.pos_embed.forward
    attend = transformer_qwenimage.dispatch_attention_fn

    def alone(shapes: Any, max_txt_seq_len: int, **named: Any) -> tuple[Tensor, ...]:
        found = [embed(shapes, max_txt_seq_len=one.shape[1], **named) for one in texts]
        return found[0][0], torch.cat([text for _, text in found])

    def with_entities(encoder_hidden_states: Tensor, **named: Any) -> Any:
        if not torch.equal(encoder_hidden_states, texts[-1]):
            return forward(encoder_hidden_states=encoder_hidden_states, **named)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dit.pos_embed, "forward", alone)
            patch.setattr(
                transformer_qwenimage,
                "dispatch_attention_fn",
                lambda *args, attn_mask, **rest: attend(
                    *args, attn_mask=allowed[None, None], **rest
                ),
            )
            return forward(encoder_hidden_states=torch.cat(texts, dim=1), **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dit, "forward", with_entities)
        return by_diffusers(QwenImagePipeline, pipe, folder, given)


def inpainted(
    pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
) -> tuple[list[Tensor], Any]:
    """diffusers' pipeline, made to begin with our noise, which it cannot take as `latents`,
    and to encode the mode of the VAE's distribution, of which it takes a sample.
    """
    given = dict(arguments)
    call = {"mask_image": given.pop("inpaint_mask"), "strength": 1.0}
    noise = given.pop("latents").transpose(1, 2)
    module = pipeline_qwenimage_inpaint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "randn_tensor", lambda *_, **__: noise)
        encode_the_mode(patch, module)
        return by_diffusers(QwenImageInpaintPipeline, pipe, folder, given, call)


def layered(
    pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
) -> tuple[list[Tensor], Any]:
    """diffusers' pipeline, made to keep our size; the first image, which it drops, is
    decoded here.
    """
    given = dict(arguments)
    height, width = given.pop("height"), given.pop("width")
    latents = given.pop("latents")
    shape = (width // DOWNSCALE, height // DOWNSCALE)
    context = given.pop("context_image")
    given["image"] = given.pop("layer_input_image")
    given["layers"] = given.pop("layer_num")
    given["true_cfg_scale"] = given.pop("guidance_scale")
    parts = {
        name: pipe.components[name] for name in ("text_encoder", "vae", "tokenizer")
    }
    published = QwenImageLayeredPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        processor=None,
        transformer=pipe.components["dit"],
        **parts,
    )
    published.set_progress_bar_config(disable=True)
    passed: list[Tensor] = []

    def unpacked(packed: Tensor) -> Tensor:
        frames = packed.unflatten(1, (given["layers"] + 1, -1)).unbind(1)
        return torch.cat([unpack(one, *shape[::-1]) for one in frames], dim=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline_qwenimage_layered,
            "calculate_dimensions",
            lambda area, ratio: (width, height),
        )
        add_context(patch, pipe, context.convert("RGBA"), 1)
        (made,) = published(
            **given,
            latents=torch.cat([pack(one) for one in latents.split(1, dim=2)], dim=1),
            callback_on_step_end=add_to(passed, unpacked),
        ).images
    config = pipe.components["vae"].config
    mean, std = (
        torch.tensor(one).view(1, -1, 1, 1, 1)
        for one in (config.latents_mean, config.latents_std)
    )
    whole = passed[-1][:, :, :1] * std + mean
    pixels = pipe.components["vae"].decode(whole, return_dict=False)[0]
    (first,) = published.image_processor.postprocess(pixels[:, :, 0])
    return passed, [first, *made]


def encode(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """Encode pixels, (1, channels, height, width), as diffusers encodes an image to edit."""
    parts = ("scheduler", "tokenizer", "processor", "text_encoder", "transformer")
    published = QwenImageEditPipeline(
        vae=pipe.components["vae"], **dict.fromkeys(parts)
    )
    latents: Tensor = published._encode_vae_image(pixels[:, :, None], torch.Generator())
    return latents


class TestConformance(Conformance):
    family = "qwen_image"
    everyday = ("base", "edit", "edit-2509", "blockwise-controlnet-inpaint", "layered")

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        variant = pipe.spec.variant
        if variant.startswith("edit"):
            return edit(pipe, folder, arguments)
        if variant.startswith("blockwise-controlnet"):
            return controlled(pipe, folder, arguments)
        if variant == "inpaint":
            return inpainted(pipe, folder, arguments)
        if variant == "eligen":
            return entities(pipe, folder, arguments)
        if variant == "layered":
            return layered(pipe, folder, arguments)
        if variant == "in-context-control":
            return in_context(pipe, folder, arguments)
        return by_diffusers(QwenImagePipeline, pipe, folder, arguments)

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        image = arguments["input_image"]
        several = image if isinstance(image, list) else [image]
        pixels = [VaeImageProcessor().preprocess(one) for one in several]
        return torch.cat([encode(pipe, one) for one in pixels], dim=2)
