"""Qwen-Image keeps the contract of a family; diffusers' pipelines are what its variants
must equal.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageImg2ImgPipeline,
    QwenImageInpaintPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.transformers import transformer_qwenimage
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_img2img,
    pipeline_qwenimage_inpaint,
    pipeline_qwenimage_layered,
)
from dstrain import Pipeline
from dstrain.plugin.functional import pack as pack_image, unpack as unpack_image
from dstrain.testing import Conformance
from PIL import Image
from torch import Tensor, nn

from tests.support.noise_images import noise_image, smooth_noise
from tests.support.published_processor import PublishedProcessor
from tests.support.published_steps import add_to, assert_equal_steps, encode_the_mode
from tests.support.toys import opened, run_unit, sharpened, toy

RENAMED = {
    "guidance_scale": "true_cfg_scale",
    "edit_image": "image",
    "input_image": "image",
}
OURS = ("edit_pixels", "edit_text_pixels")
PUBLISHED_PIXELS = {1024 * 1024: "edit_pixels", 384 * 384: "edit_text_pixels"}


def pack(latents: Tensor) -> Tensor:
    """Return latents, (batch, 16, 1, h, w), as tokens."""
    return pack_image(latents[:, :, 0])


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    return unpack_image(tokens, height, width)[:, :, None]


@contextmanager
def instead(module: ModuleType, name: str, function: Any) -> Iterator[None]:
    """Let a module of diffusers call another function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, function)
        yield


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
    height, width = (arguments[side] // 8 for side in ("height", "width"))
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
    is_one = pipe.spec.variant == "edit"
    kind = QwenImageEditPipeline if is_one else QwenImageEditPlusPipeline
    module = pipeline_qwenimage_edit if is_one else pipeline_qwenimage_edit_plus
    exact = module.calculate_dimensions

    def dimensions(area: int, ratio: float) -> Any:
        return exact(arguments[PUBLISHED_PIXELS[area]], ratio)

    def tell_images(_: Any, given: Any, named: dict[str, Any]) -> Any:
        is_image = named["input_ids"] == encoder.config.image_token_id
        return given, {**named, "mm_token_type_ids": is_image.int()}

    processor = PublishedProcessor(pipe.components["processor"])
    hook = encoder.register_forward_pre_hook(tell_images, with_kwargs=True)
    try:
        with instead(module, "calculate_dimensions", dimensions):
            return by_diffusers(kind, pipe, folder, arguments, processor=processor)
    finally:
        hook.remove()


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
    with with_context(pipe, given.pop("context_image"), 0):
        return by_diffusers(QwenImagePipeline, pipe, folder, given)


@contextmanager
def with_context(pipe: Pipeline, image: Image.Image, place: int) -> Iterator[None]:
    """Give the transformer the tokens of an image before the last `place` ones."""
    context = pack(encode(pipe, VaeImageProcessor().preprocess(image)))
    ends: list[int] = []

    def add(_: Any, given: Any, named: dict[str, Any]) -> Any:
        states = named["hidden_states"]
        ends.append(states.shape[1] - place * context.shape[1])
        parts = [states[:, : ends[-1]], context, states[:, ends[-1] :]]
        grids = []
        for one in named["img_shapes"]:
            images = len(one) - place
            grids.append([*one[:images], one[0], *one[images:]])
        more = {"hidden_states": torch.cat(parts, dim=1), "img_shapes": grids}
        return given, {**named, **more}

    def cut(_: Any, __: Any, made: tuple[Tensor]) -> tuple[Tensor]:
        return (made[0][:, : ends[-1]],)

    dit = pipe.components["dit"]
    hooks = [
        dit.register_forward_pre_hook(add, with_kwargs=True),
        dit.register_forward_hook(cut),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
    embed, attend = dit.pos_embed.forward, transformer_qwenimage.dispatch_attention_fn
    positive: list[bool] = []

    def with_entities(_: Any, given: Any, named: dict[str, Any]) -> Any:
        positive.append(torch.equal(named["encoder_hidden_states"], texts[-1]))
        joined = {"encoder_hidden_states": torch.cat(texts, dim=1)}
        return given, {**named, **(joined if positive[-1] else {})}

    def alone(_: Any, given: Any, named: dict[str, Any], made: Any) -> Any:
        if not positive[-1]:
            return made
        lengths = [one.shape[1] for one in texts]
        found = [embed(*given, **{**named, "max_txt_seq_len": one}) for one in lengths]
        return found[0][0], torch.cat([text for _, text in found])

    def masked(*given: Any, **named: Any) -> Any:
        mask = {"attn_mask": allowed[None, None]} if positive[-1] else {}
        return attend(*given, **{**named, **mask})

    hooks = [
        dit.register_forward_pre_hook(with_entities, with_kwargs=True),
        dit.pos_embed.register_forward_hook(alone, with_kwargs=True),
    ]
    try:
        with instead(transformer_qwenimage, "dispatch_attention_fn", masked):
            return by_diffusers(QwenImagePipeline, pipe, folder, given)
    finally:
        for hook in hooks:
            hook.remove()


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
    with (
        pytest.MonkeyPatch.context() as patch,
        instead(module, "randn_tensor", lambda *_, **__: noise),
    ):
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
    shape = (height // 8, width // 8)
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
        return torch.cat([unpack(one, *shape) for one in frames], dim=2)

    module = pipeline_qwenimage_layered
    with (
        with_context(pipe, context.convert("RGBA"), 1),
        instead(module, "calculate_dimensions", lambda area, ratio: (width, height)),
    ):
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


def half_mask(width: int, height: int) -> Image.Image:
    mask = Image.new("L", (width, height))
    mask.paste(255, (width // 2, 0, width, height))
    return mask


def by_pipe(pipe: Pipeline, **given: Any) -> tuple[list[Tensor], Any]:
    """Return the packed latents after each step, and the image."""
    passed: list[Tensor] = []
    made = pipe(**given, on_step=lambda step, latents: passed.append(pack(latents)))
    return passed, made


def assert_alike(made: Image.Image, wanted: Image.Image) -> None:
    """Latents that differ by their rounding may be at the edge of two values."""
    assert made.size == wanted.size
    assert np.abs(np.asarray(made, int) - np.asarray(wanted, int)).max() <= 1


@pytest.mark.parametrize("inpaints", [False, True])
@pytest.mark.parametrize(
    ("strength", "scale", "steps"), [(0.1, 1.0, 1), (0.6, 4.0, 5), (1.0, 1.0, 7)]
)
def test_from_an_image_every_step_equals_that_of_diffusers(
    inpaints: bool,
    strength: float,
    scale: float,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode_the_mode(monkeypatch, pipeline_qwenimage_img2img, pipeline_qwenimage_inpaint)
    variant = "inpaint" if inpaints else "base"
    pipe, folder = opened("qwen_image", variant), toy("qwen_image", variant)
    parts = {name: one for name, one in pipe.components.items() if name != "dit"}
    kind = QwenImageInpaintPipeline if inpaints else QwenImageImg2ImgPipeline
    published = kind(
        **parts,
        transformer=pipe.components["dit"],
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    published.set_progress_bar_config(disable=True)
    image, mask = noise_image(96, 64), half_mask(96, 64)
    theirs: list[Tensor] = []
    common = {"prompt": "a red apple on a table", "negative_prompt": "blurry"}
    common |= {"num_inference_steps": 7, "height": 64, "width": 96}
    wanted = published(
        **common,
        **({"mask_image": mask} if inpaints else {}),
        image=image,
        strength=strength,
        true_cfg_scale=scale,
        callback_on_step_end=add_to(theirs),
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    ours, made = by_pipe(
        pipe,
        **common,
        **({"inpaint_mask": mask} if inpaints else {}),
        input_image=image,
        denoising_strength=strength,
        seed=5,
        guidance_scale=scale,
    )
    assert_equal_steps(ours, theirs, steps)
    assert_alike(made, wanted)


@pytest.mark.parametrize(
    ("variant", "sizes", "side"),
    [
        ("edit", [(200, 90)], {}),
        ("edit", [(64, 64)], {"height": 96, "width": 48}),
        ("edit-2509", [(120, 100)], {}),
        ("edit-2509", [(120, 100), (50, 90)], {"height": 64, "width": 80}),
        ("edit-2511", [(64, 64), (30, 90)], {}),
    ],
)
def test_images_of_any_size_are_edited_as_by_diffusers(
    variant: str, sizes: list[tuple[int, int]], side: dict[str, int]
) -> None:
    pipe = sharpened(opened("qwen_image", variant))
    images = [smooth_noise(*size, seed) for seed, size in enumerate(sizes)]
    unit = "resize_edit_image" if variant == "edit" else "resize_edit_images"
    read: dict[str, Any] = {"edit_pixels": 64 * 128, "edit_image": images}
    if variant == "edit":
        read["edit_image"] = images[0]
    else:
        read["edit_text_pixels"] = 64 * 64
    resized = run_unit(pipe, unit, **read)["resized_edit_images"]
    shape = pipe.spec.latent_shape.function(resized, **side)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    given = {
        **read,
        "prompt": "put the red apple of Picture 1 on the table",
        "negative_prompt": "blurry and many other words",
        "guidance_scale": 4.0,
        "num_inference_steps": 4,
        "latents": noise,
    }
    ours, made = by_pipe(pipe, **given, **side)
    size = {"height": 8 * shape[3], "width": 8 * shape[4]}
    theirs, wanted = edit(pipe, toy("qwen_image", variant), {**given, **size})
    assert_equal_steps(ours, [pack(one) for one in theirs], 4)
    assert_alike(made, wanted)
