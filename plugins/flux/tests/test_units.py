"""Units give what diffusers' pipelines give, for one sample, from plain values."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from dstrain import Pipeline, UsageError
from dstrain.graph import LongPrompt, noticing_long_prompts
from dstrain_flux import MODEL
from PIL import Image

from tests.support.noise_images import noise_image, smooth_noise
from tests.support.toys import opened, run_unit

PUBLISHED_AREA = 1024 * 1024
PROMPTS = [
    "a red apple on a table",
    "",
    " ",
    "\n red",
    "the dog " * 900,
    "红苹果 <|endoftext|> </s> {}",
]


@torch.no_grad()
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    ("variant", "unit", "tokens"),
    [("dev", "encode_prompt", 512), ("schnell", "encode_schnell_prompt", 256)],
)
def test_prompt_embeddings_are_bit_equal_to_diffusers(
    variant: str, unit: str, tokens: int, prompt: str
) -> None:
    pipe = opened("flux", variant)
    published = FluxPipeline(
        scheduler=None,
        vae=None,
        text_encoder=pipe.components["text_encoder_1"],
        tokenizer=pipe.components["tokenizer_1"],
        text_encoder_2=pipe.components["text_encoder_2"],
        tokenizer_2=pipe.components["tokenizer_2"],
        transformer=None,
    )
    wanted, pooled, ids = published.encode_prompt(prompt, max_sequence_length=tokens)
    too_long: list[LongPrompt] = []
    with noticing_long_prompts(too_long.append):
        made = run_unit(pipe, unit, prompt=prompt)["prompt_emb"]
        clip = run_unit(pipe, "encode_clip", prompt=prompt)["pooled_emb"]
    assert made.shape == (1, tokens, 32)
    assert torch.equal(made, wanted)
    assert torch.equal(clip, pooled)
    limits = [("T5", tokens - 1, False), ("CLIP", 75, True)]
    found = [(one.model, one.limit, one.usual) for one in too_long]
    assert found == (limits if len(prompt) > 1000 else [])
    assert not ids.any()


def kontext_sizes(pixels: int, *sizes: tuple[int, int]) -> list[tuple[int, int]]:
    images = [Image.new("L", size) for size in sizes]
    given = {"kontext_images": images, "kontext_pixels": pixels}
    made = run_unit(opened("flux", "kontext"), "resize_kontext", **given)
    return [one.size for one in made["resized_kontext_images"]]


def test_at_the_published_area_kontexts_sizes_are_those_that_diffusers_chooses() -> (
    None
):
    given = inspect.signature(FluxKontextPipeline.__call__).parameters["max_area"]
    constant = MODEL.spec("kontext").constants["kontext_pixels"]
    assert constant.value == given.default == PUBLISHED_AREA
    processor = VaeImageProcessor(vae_scale_factor=16)
    numbers = np.random.default_rng(0).integers(16, 600, (60, 2))
    sizes = [(int(width), int(height)) for width, height in numbers]
    sizes += [(w // 4, h // 4) for w, h in PREFERRED_KONTEXT_RESOLUTIONS]
    sizes += [(1024, 1024), (4000, 31), (31, 4000)]
    made = kontext_sizes(PUBLISHED_AREA, *sizes)
    for size, found in zip(sizes, made, strict=True):
        rows, columns = processor.get_default_height_width(Image.new("L", size))
        wanted = min(
            (abs(columns / rows - width / height), width, height)
            for width, height in PREFERRED_KONTEXT_RESOLUTIONS
        )
        assert found == wanted[1:], size


@pytest.mark.parametrize(
    ("shape", "pixels", "wanted"),
    [
        ((3, 5), PUBLISHED_AREA, (1024, 1024)),
        ((80, 48), 64 * 64, (80, 48)),
        ((1920, 1080), 512 * 512, (704, 384)),
        ((9, 9), 1, (16, 16)),
        ((100, 100), 2048 * 2048, (2048, 2048)),
    ],
)
def test_kontexts_sizes_of_other_areas_are_scaled(
    shape: tuple[int, int], pixels: int, wanted: tuple[int, int]
) -> None:
    assert kontext_sizes(pixels, shape) == [wanted]


@torch.no_grad()
def test_images_to_edit_become_latents_each_of_its_own_size() -> None:
    pipe = opened("flux", "kontext")
    images = [smooth_noise(200, 64).convert("RGBA"), smooth_noise(40, 40).convert("L")]
    given = {"kontext_images": images, "kontext_pixels": 64 * 64}
    made = run_unit(pipe, "resize_kontext", **given)
    first, second = made["resized_kontext_images"]
    assert (first.mode, first.size) == ("RGB", (96, 48))
    assert (second.mode, second.size) == ("RGB", (64, 64))
    latents = run_unit(pipe, "encode_kontext", **made)["kontext_latents"]
    alone = run_unit(pipe, "encode_image", input_image=first)["input_latents"]
    assert torch.equal(latents[0], alone)
    assert [one.shape[-2:] for one in latents] == [(6, 12), (8, 8)]


def filled(pipe: Pipeline, image: Image.Image, mask: Image.Image) -> dict[str, Any]:
    given = {"flux_fill_image": image, "flux_fill_mask": mask}
    return run_unit(pipe, "encode_fill", **given, height=32, width=48)


@torch.no_grad()
@pytest.mark.parametrize("size", [(48, 32), (30, 20)])
def test_a_mask_is_white_from_half_grey_on_at_any_size(size: tuple[int, int]) -> None:
    pipe, halves = opened("flux", "fill"), Image.new("L", size, 127)
    halves.paste(128, (size[0] // 2, 0, *size))
    mask = filled(pipe, noise_image(48, 32), halves)["fill_mask"]
    assert mask.shape == (1, 64, 4, 6)
    assert not mask[..., :3].any()
    assert mask[..., 3:].all()


def test_a_union_of_controlnets_knows_kinds_by_the_numbers_of_its_model_card() -> None:
    pipe = opened("flux", "controlnet-union")
    kinds = ("canny", "tile", "depth", "blur", "pose", "gray", "lq")
    for number, kind in enumerate(kinds):
        made = run_unit(pipe, "find_control_mode", controlnet_processor_id=kind)
        assert made["control_mode"].tolist() == [[number]]


def test_of_each_eight_by_eight_pixels_one_tells_and_half_grey_is_white() -> None:
    pixels = np.zeros((32, 48), dtype=np.uint8)
    pixels[4, 4], pixels[12, 20], pixels[0, 0] = 128, 127, 255
    masks = [Image.fromarray(pixels), Image.new("RGB", (10, 10), "white")]
    pipe = opened("flux", "eligen")
    given: dict[str, Any] = {"eligen_entity_masks": masks, "height": 32, "width": 48}
    given["eligen_entity_prompts"] = ["a", "b"]
    made = run_unit(pipe, "resize_entity_masks", **given)["entity_masks"]
    assert made.shape == (1, 2, 4, 6)
    assert made[0, 0].nonzero().tolist() == [[0, 0]]
    assert made[0, 1].all()
    given["eligen_entity_prompts"] = ["a"]
    with pytest.raises(UsageError, match=r"eligen_entity_masks: .* 2, .* 1"):
        run_unit(pipe, "resize_entity_masks", **given)
