"""Units give what diffusers' pipelines give, for one sample, from plain values."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from dstrain.plugin import Unit
from dstrain_flux import units
from PIL import Image

from tests.support.noise_images import smooth_noise

CLIP, PROMPT, IMAGE = (
    Unit(unit) for unit in (units.encode_clip, units.encode_prompt, units.encode_image)
)
PROMPTS = [
    "a red apple on a table",
    "",
    " ",
    "\n red",
    "the dog " * 900,
    "红苹果 <|endoftext|> </s> {}",
]


@pytest.fixture
def published(loaded: dict[str, Any]) -> FluxPipeline:
    return FluxPipeline(
        scheduler=None,
        vae=loaded["vae"],
        text_encoder=loaded["text_encoder_1"],
        tokenizer=loaded["tokenizer_1"],
        text_encoder_2=loaded["text_encoder_2"],
        tokenizer_2=loaded["tokenizer_2"],
        transformer=loaded["dit"],
    )


@torch.no_grad()
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_embeddings_are_bit_equal_to_diffusers(
    prompt: str, loaded: dict[str, Any], published: FluxPipeline
) -> None:
    wanted, pooled, ids = published.encode_prompt(prompt)
    assert torch.equal(PROMPT.run({"prompt": prompt}, loaded)["prompt_emb"], wanted)
    assert torch.equal(CLIP.run({"prompt": prompt}, loaded)["pooled_emb"], pooled)
    assert wanted.shape == (1, 512, 32)
    assert not ids.any()


@torch.no_grad()
@pytest.mark.parametrize(("width", "height"), [(64, 96), (32, 32)])
def test_an_image_is_encoded_as_the_normalized_mode(
    width: int, height: int, loaded: dict[str, Any]
) -> None:
    vae = loaded["vae"]
    pixels = VaeImageProcessor().preprocess(smooth_noise(width, height))
    wanted = (
        vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor
    ) * vae.config.scaling_factor
    made = IMAGE.run({"input_image": smooth_noise(width, height)}, loaded)[
        "input_latents"
    ]
    assert made.shape == (1, 16, height // 8, width // 8)
    assert torch.equal(made, wanted)


@torch.no_grad()
def test_decoding_undoes_the_normalization_as_diffusers_does(
    loaded: dict[str, Any],
) -> None:
    vae = loaded["vae"]
    latents = torch.randn(1, 16, 8, 12, generator=torch.Generator().manual_seed(0))
    pixels = vae.decode(
        latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False
    )[0]
    made = units.decode(latents, vae=vae)["image"]
    assert made.size == (96, 64)
    assert np.array_equal(
        np.asarray(made), np.asarray(VaeImageProcessor().postprocess(pixels, "pil")[0])
    )


@torch.no_grad()
def test_in_bf16_embeddings_are_bf16_and_latents_fp32(
    loaded_bf16: dict[str, Any],
) -> None:
    loaded = loaded_bf16
    assert PROMPT.run({"prompt": "x"}, loaded)["prompt_emb"].dtype == torch.bfloat16
    assert CLIP.run({"prompt": "x"}, loaded)["pooled_emb"].dtype == torch.bfloat16
    latents = IMAGE.run({"input_image": smooth_noise(32, 32)}, loaded)["input_latents"]
    assert latents.dtype == torch.float32
    assert units.decode(latents, vae=loaded["vae"])["image"].size == (32, 32)


def test_kontexts_sizes_are_those_of_diffusers() -> None:
    assert list(units.KONTEXT_SIZES) == PREFERRED_KONTEXT_RESOLUTIONS
    assert (
        inspect.signature(FluxKontextPipeline.__call__).parameters["max_area"].default
        == units.KONTEXT_PIXELS
    )


def test_at_the_published_area_the_size_is_that_which_diffusers_chooses() -> None:
    processor = VaeImageProcessor(vae_scale_factor=16)
    numbers = np.random.default_rng(0).integers(16, 3000, (300, 2)).tolist()
    for width, height in (*numbers, (1024, 1024), (4000, 31), (31, 4000)):
        rows, columns = processor.get_default_height_width(
            Image.new("L", (width, height))
        )
        wanted = min(
            (abs(columns / rows - w / h), w, h)
            for w, h in PREFERRED_KONTEXT_RESOLUTIONS
        )[1:]
        assert units.kontext_size(width, height, 1024 * 1024) == wanted, (width, height)


@pytest.mark.parametrize(
    ("shape", "pixels", "wanted"),
    [((3, 5), 1024 * 1024, (1024, 1024)), ((80, 48), 64 * 64, (80, 48)), ((1920, 1080), 512 * 512, (704, 384)),
     ((9, 9), 1, (16, 16)), ((100, 100), 2048 * 2048, (2048, 2048))],
)  # fmt: skip
def test_sizes_of_other_areas_are_scaled(
    shape: tuple[int, int], pixels: int, wanted: tuple[int, int]
) -> None:
    assert units.kontext_size(*shape, pixels) == wanted


@torch.no_grad()
def test_images_to_edit_become_latents_each_of_its_own_size(
    loaded: dict[str, Any],
) -> None:
    given = [smooth_noise(200, 64).convert("RGBA"), smooth_noise(40, 40).convert("L")]
    made = Unit(units.resize_kontext).run(
        {"kontext_images": given, "kontext_pixels": 64 * 64}, loaded
    )
    images = made["resized_kontext_images"]
    assert [(one.mode, one.size) for one in images] == [
        ("RGB", (96, 48)),
        ("RGB", (64, 64)),
    ]
    latents = Unit(units.encode_kontext).run(made, loaded)["kontext_latents"]
    assert torch.equal(
        latents[0], IMAGE.run({"input_image": images[0]}, loaded)["input_latents"]
    )
    assert [one.shape[-2:] for one in latents] == [(6, 12), (8, 8)]
