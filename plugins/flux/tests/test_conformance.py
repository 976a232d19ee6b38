"""FLUX keeps the contract of a family; diffusers' pipeline is what it must equal."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetPipeline,
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxPriorReduxPipeline,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.pipelines.flux import pipeline_flux_img2img
from dstrain import Pipeline
from dstrain.plugin.functional import pack, unpack
from dstrain.testing import Conformance
from dstrain_flux import MODEL
from PIL import Image
from torch import Tensor
from transformers import SiglipImageProcessor

from tests.support.noise_images import noise_image, smooth_noise
from tests.support.published_steps import add_to, assert_equal_steps, encode_the_mode
from tests.support.toys import opened, run_unit, sharpened, toy

RENAMED = {"guidance_scale": "true_cfg_scale", "embedded_guidance": "guidance_scale"}
PARTS = {
    "dit": "transformer",
    "controlnet": "controlnet",
    "text_encoder_1": "text_encoder",
    "text_encoder_2": "text_encoder_2",
    "tokenizer_1": "tokenizer",
    "tokenizer_2": "tokenizer_2",
    "vae": "vae",
}


CONTROL_MODES = ("canny", "tile", "depth", "blur", "pose", "gray", "lq")
"""By their numbers, of the model card of FLUX.1-dev-Controlnet-Union-alpha."""
TEXT = ("text_encoder_1", "text_encoder_2", "tokenizer_1", "tokenizer_2")
CLASSES = {
    "kontext": FluxKontextPipeline,
    "fill": FluxFillPipeline,
    "controlnet": FluxControlNetPipeline,
    "controlnet-union": FluxControlNetPipeline,
    "controlnet-inpaint": FluxControlNetPipeline,
}


def build(pipe: Pipeline, folder: Path, kind: Any) -> Any:
    """Build a pipeline of diffusers with the components of ours."""
    published = kind(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        **{PARTS[name]: one for name, one in pipe.components.items() if name in PARTS},
    )
    published.set_progress_bar_config(disable=True)
    return published


def kontext(pipe: Pipeline, given: dict[str, Any]) -> None:
    """Give Kontext's image resized: that both do it alike is tested with the units."""
    read = {name: given.pop(name) for name in ("kontext_images", "kontext_pixels")}
    (resized,) = run_unit(pipe, "resize_kontext", **read)["resized_kontext_images"]
    area = given["height"] * given["width"]
    given |= {"image": resized, "_auto_resize": False, "max_area": area}


def fill(pipe: Pipeline, given: dict[str, Any]) -> None:
    """Give Fill's image and mask by the names of diffusers."""
    given |= {"image": given.pop("flux_fill_image")}
    given |= {"mask_image": given.pop("flux_fill_mask")}
    del given["true_cfg_scale"]


def controlnet(pipe: Pipeline, given: dict[str, Any]) -> None:
    """Give a ControlNet's image and kind by the names of diffusers."""
    given["control_image"] = given.pop("controlnet_image")
    given["controlnet_conditioning_scale"] = given.pop("controlnet_scale")
    if "controlnet_processor_id" in given:
        kind = given.pop("controlnet_processor_id")
        given["control_mode"] = CONTROL_MODES.index(kind)
    if "controlnet_inpaint_mask" in given:
        mask = np.asarray(given.pop("controlnet_inpaint_mask")) >= 128
        pixels = np.where(mask[..., None], 0, np.asarray(given["control_image"]))
        given["control_image"] = Image.fromarray(pixels.astype(np.uint8))


def mask_tokens(arguments: Mapping[str, Any]) -> Tensor:
    """Return what the tokens of a masked control image have beyond its latents: 1 where it
    is known, of each 8x8 pixels the first one's.
    """
    mask = np.asarray(arguments["controlnet_inpaint_mask"]) >= 128
    return pack(1 - torch.from_numpy(mask).float()[None, None, ::8, ::8])


@contextmanager
def per_branch(published: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let the ControlNet see the prompt of each branch, as the publishers' own pipelines
    do: that of diffusers shows it the positive one alone. It also sees a mask.
    """
    seen: dict[str, Any] = {}
    masked = "controlnet_inpaint_mask" in arguments

    def note(_: Any, __: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        condition = given["controlnet_cond"]
        if masked:
            condition = torch.cat([condition, mask_tokens(arguments)], dim=-1)
        seen.update({**given, "controlnet_cond": condition})
        return (), {**given, "controlnet_cond": condition}

    def again(_: Any, __: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        texts = {
            name: given[name]
            for name in ("encoder_hidden_states", "pooled_projections")
        }
        control = {**seen, **texts}
        joint, single = published.controlnet.forward(**control)
        added = {
            "controlnet_block_samples": joint,
            "controlnet_single_block_samples": single,
        }
        return (), {**given, **added}

    hooks = [
        published.controlnet.register_forward_pre_hook(note, with_kwargs=True),
        published.transformer.register_forward_pre_hook(again, with_kwargs=True),
    ]
    yield
    for hook in hooks:
        hook.remove()


def redux(pipe: Pipeline, given: dict[str, Any]) -> None:
    """Give what diffusers' prior pipeline makes of the image and the prompt."""
    side = pipe.components["image_encoder"].config.image_size
    prior = FluxPriorReduxPipeline(
        image_encoder=pipe.components["image_encoder"],
        feature_extractor=SiglipImageProcessor(size={"height": side, "width": side}),
        image_embedder=pipe.components["redux"],
        **{PARTS[name]: pipe.components[name] for name in TEXT},
    )
    made = prior(given.pop("flux_redux_image"), prompt=given.pop("prompt"))
    given["prompt_embeds"] = made.prompt_embeds
    given["pooled_prompt_embeds"] = made.pooled_prompt_embeds


class PublishedAttention:
    """Attention to text, images and the IP-Adapter's images, by its equations, for there
    is no such network in diffusers: as in InstantX/FLUX.1-dev-IP-Adapter
    (attention_processor.py), out = softmax(q k' / sqrt(d)) v + s softmax(p l' / sqrt(d)) w
    for the image's tokens in joint blocks and for all in single ones, where p are queries
    before they get positions, l normalized keys and w values of the IP-Adapter's images.
    """

    def __init__(self, layer: Any, images: Callable[[], Tensor], scale: float) -> None:
        self.layer, self.images, self.scale = layer, images, scale

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        heads = (attn.heads, attn.head_dim)
        p = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, heads))
        k = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, heads))
        q, v = p, attn.to_v(hidden_states).unflatten(-1, heads)
        texts = 0
        if encoder_hidden_states is not None:
            texts = encoder_hidden_states.shape[1]
            text = [
                project(encoder_hidden_states).unflatten(-1, heads)
                for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            ]
            q = torch.cat([attn.norm_added_q(text[0]), q], dim=1)
            k = torch.cat([attn.norm_added_k(text[1]), k], dim=1)
            v = torch.cat([text[2], v], dim=1)
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        found = attend(q, k, v)
        weight = self.layer.to_k_ip.weight
        keys = (self.images() @ weight.T).unflatten(-1, heads)
        keys = keys / (keys.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        values = (self.images() @ self.layer.to_v_ip.weight.T).unflatten(-1, heads)
        found[:, texts:] += self.scale * attend(p, keys, values)
        if encoder_hidden_states is None:
            return found
        return attn.to_out[0](found[:, texts:]), attn.to_add_out(found[:, :texts])


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k' / sqrt(d)) v, its heads joined."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


@contextmanager
def attending(pipe: Pipeline, given: dict[str, Any]) -> Iterator[None]:
    """Let the denoiser attend to an IP-Adapter's images, zeros in the negative branch, which
    diffusers' pipeline calls second.
    """
    dit, ipadapter = pipe.components["dit"], pipe.components["ipadapter"]
    encoder = pipe.components["image_encoder"]
    side = encoder.config.image_size
    see = SiglipImageProcessor(size={"height": side, "width": side})
    images = see(given.pop("ipadapter_images"), return_tensors="pt").pixel_values
    encoded = encoder(images).pooler_output[:, None]
    first, _, second = ipadapter.image_proj.proj
    norm = ipadapter.image_proj.norm

    def tokens(embeddings: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(embeddings @ first.weight.T + first.bias)
        found = hidden @ second.weight.T + second.bias
        return norm(found.reshape(1, -1, norm.weight.numel()))

    branches = [tokens(encoded.detach())]
    if given["true_cfg_scale"] > 1:
        branches.append(tokens(torch.zeros_like(encoded)))
    calls: list[int] = []
    count = dit.register_forward_pre_hook(lambda *_: calls.append(1))
    blocks = [*dit.transformer_blocks, *dit.single_transformer_blocks]
    before = [block.attn.processor for block in blocks]
    scale = given.pop("ipadapter_scale")
    for block, layer in zip(blocks, ipadapter.ip_adapter, strict=True):
        block.attn.processor = PublishedAttention(
            layer, lambda: branches[(len(calls) - 1) % len(branches)], scale
        )
    with torch.no_grad():
        yield
    count.remove()
    for block, one in zip(blocks, before, strict=True):
        block.attn.processor = one


@contextmanager
def regions(pipe: Pipeline, given: dict[str, Any]) -> Iterator[None]:
    """Let the denoiser see the prompts of regions, each only with its region: diffusers has
    no EliGen, so its transformer gets longer texts and a mask, entry by entry.
    """
    prompts = given.pop("eligen_entity_prompts")
    masks = [np.asarray(mask) for mask in given.pop("eligen_entity_masks")]
    encoded = [
        run_unit(pipe, "encode_prompt", prompt=prompt)["prompt_emb"]
        for prompt in prompts
    ]
    height, width = given["height"] // 16, given["width"] // 16
    count = encoded[0].shape[1]
    texts = count * (len(prompts) + 1)
    # Of the 16x16 pixels of a token four tell, in the middle of 8x8 pixels.
    white = [
        (mask[4::8, 4::8] >= 128).reshape(height, 2, width, 2).any((1, 3)).flatten()
        for mask in masks
    ]
    seen = torch.ones(texts + height * width, texts + height * width, dtype=torch.bool)
    for one in range(texts):
        owner = one // count
        for other in range(0, texts, count):
            seen[one, other : other + count] = other // count == owner
        if owner < len(prompts):
            seen[one, texts:] = seen[texts:, one] = torch.from_numpy(white[owner])
    calls: list[int] = []
    guided = given["true_cfg_scale"] > 1

    def see(_: Any, __: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        calls.append(1)
        if guided and len(calls) % 2 == 0:
            return (), named
        text = torch.cat([*encoded, named["encoder_hidden_states"]], dim=1)
        return (), {
            **named,
            "encoder_hidden_states": text,
            "txt_ids": torch.zeros(texts, 3),
            "joint_attention_kwargs": {"attention_mask": seen},
        }

    hook = pipe.components["dit"].register_forward_pre_hook(see, with_kwargs=True)
    with torch.no_grad():
        yield
    hook.remove()


def schnell(pipe: Pipeline, given: dict[str, Any]) -> None:
    """Give the length of prompts of schnell's model card."""
    given["max_sequence_length"] = 256


ADAPTED = {
    "schnell": schnell,
    "kontext": kontext,
    "fill": fill,
    "controlnet": controlnet,
    "controlnet-union": controlnet,
    "controlnet-inpaint": controlnet,
    "redux": redux,
}
AROUND = {"ip-adapter": attending, "eligen": regions}


@contextmanager
def modes() -> Iterator[None]:
    """Let VAEs of diffusers encode as the mode: some pipelines draw a sample instead."""
    kind = DiagonalGaussianDistribution
    with patch.object(kind, "sample", lambda self, generator=None: self.mode()):
        yield


class TestConformance(Conformance):
    family = "flux"
    everyday = ("dev", "kontext", "controlnet-union", "ip-adapter")
    published_images = 1

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        variant = pipe.spec.variant
        published = build(pipe, folder, CLASSES.get(variant, FluxPipeline))
        height, width = (arguments[side] // 8 for side in ("height", "width"))
        passed: list[Tensor] = []
        at_step_end = add_to(passed, partial(unpack, height=height, width=width))
        given = {RENAMED.get(name, name): value for name, value in arguments.items()}
        given["latents"] = pack(arguments["latents"])
        if variant in ADAPTED:
            ADAPTED[variant](pipe, given)
        with ExitStack() as stack:
            stack.enter_context(modes())
            if variant.startswith("controlnet"):
                stack.enter_context(per_branch(published, arguments))
            if variant in AROUND:
                stack.enter_context(AROUND[variant](pipe, given))
            image = published(**given, callback_on_step_end=at_step_end).images[0]
        return passed, image

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Encode as diffusers encodes an image to edit."""
        parts = ("scheduler", *(PARTS[name] for name in MODEL.spec("dev").components))
        published = FluxKontextPipeline(
            **{**dict.fromkeys(parts), "vae": pipe.components["vae"]}
        )
        image = published.image_processor.preprocess(arguments["input_image"])
        latents: Tensor = published._encode_vae_image(image, torch.Generator())
        return latents


def by_diffusers(
    kind: Any, pipe: Pipeline, folder: Path, **given: Any
) -> tuple[list[Tensor], Any]:
    """Return the packed latents after each step of diffusers' pipeline, and its image."""
    passed: list[Tensor] = []
    published = build(pipe, folder, kind)
    images = published(**given, callback_on_step_end=add_to(passed)).images
    return passed, images[0]


def by_pipe(pipe: Pipeline, **given: Any) -> tuple[list[Tensor], Any]:
    """Return the packed latents after each step of ours, and its image."""
    passed: list[Tensor] = []
    made = pipe(**given, on_step=lambda step, latents: passed.append(pack(latents)))
    return passed, made


def assert_equal_images(
    ours: tuple[list[Tensor], Any], theirs: tuple[list[Tensor], Any], steps: int
) -> None:
    assert_equal_steps(ours[0], theirs[0], steps)
    assert np.array_equal(np.asarray(ours[1]), np.asarray(theirs[1]))


@pytest.mark.parametrize(
    ("strength", "scale", "steps"),
    [(0.05, 1.0, 1), (0.5, 1.0, 4), (0.72, 3.0, 6), (1.0, 1.0, 7)],
)
def test_from_an_image_every_step_equals_that_of_diffusers(
    strength: float, scale: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_the_mode(monkeypatch, pipeline_flux_img2img)
    pipe, image = opened("flux", "dev"), noise_image(96, 64)
    common = {"prompt": "a red table", "negative_prompt": "blurry, ugly"}
    common |= {"num_inference_steps": 7}
    theirs = by_diffusers(
        FluxImg2ImgPipeline,
        pipe,
        toy("flux", "dev"),
        **common,
        image=image,
        height=64,
        width=96,
        strength=strength,
        true_cfg_scale=scale,
        guidance_scale=3.5,
        generator=torch.Generator().manual_seed(5),
    )
    ours = by_pipe(
        pipe,
        **common,
        input_image=image,
        denoising_strength=strength,
        seed=5,
        guidance_scale=scale,
    )
    assert_equal_images(ours, theirs, steps)


def test_at_the_published_area_kontext_equals_diffusers_from_an_image_of_any_size() -> (
    None
):
    """Of this size, an image whose tensor has another memory format gets other
    latents.
    """
    pipe, image = sharpened(opened("flux", "kontext")), smooth_noise(300, 130)
    noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(5))
    common = {"prompt": "a dog", "height": 64, "width": 64, "num_inference_steps": 1}
    theirs = by_diffusers(
        FluxKontextPipeline,
        pipe,
        toy("flux", "kontext"),
        **common,
        latents=pack(noise),
        image=image,
        guidance_scale=2.5,
        max_area=64 * 64,
    )
    ours = by_pipe(pipe, **common, latents=noise, kontext_images=[image])
    assert_equal_images(ours, theirs, 1)


def test_a_denoiser_without_embedded_guidance_gets_none_and_equals_diffusers(
    tmp_path: Path,
) -> None:
    MODEL.load("toy")(tmp_path, sizes={"dit": {"guidance_embeds": False}})
    pipe = Pipeline.from_pretrained(tmp_path, variant="dev")
    noise = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(5))
    common = {"prompt": "a dog", "height": 32, "width": 32, "num_inference_steps": 2}
    latents = {"latents": pack(noise)}
    theirs = by_diffusers(FluxPipeline, pipe, tmp_path, **common, **latents)
    assert_equal_images(by_pipe(pipe, **common, latents=noise), theirs, 2)
